"""The certificates of a local testbed. Its authority and all keys are in its workspace."""

import datetime
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from collapipe.certificates import Identity, Role
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.private_files import file_errors
from collapipe.rpc import Security

USER = Identity(Role.CLIENT, "local")
"""Whoever uses the testbed."""
PROMETHEUS = Identity(Role.PROMETHEUS, "prometheus")
"""Whoever reads the pages of metrics."""


class LocalCertificates:
    """The folder with the authority of a testbed and the certificates of its processes.

    Only the user of the folder can read the keys. So other users of the machine cannot use the testbed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_old(self) -> bool:
        """Whether an older version made the authority. `issue` then makes another one, which processes that run do not trust."""
        return AuthorityFolder.is_old(self._folder)

    def issue(
        self, holders: Mapping[Identity, Iterable[str]], lifetime: datetime.timedelta
    ) -> None:
        """Makes sure that holders have certificates that are not due for renewal.

        Args:
            holders: The host names and IP addresses of each holder, besides those of this machine.

        Raises:
            InvalidInputError: The folder is damaged, or cannot be written.
        """
        if self.is_old:
            # Only the services of this testbed trust it, and they start again.
            with file_errors(self._folder):
                shutil.rmtree(self._folder)
        # The passphrase in the environment is that of a deployment.
        if AuthorityFolder.exists(self._folder):
            authority = AuthorityFolder(self._folder, passphrase=b"")
        else:
            authority = AuthorityFolder.create(self._folder, passphrase=b"")
        if authority.is_issuer_due:
            authority.renew_issuer(AuthorityFolder.root_in(self._folder))
        for identity, hosts in holders.items():
            authority.issue(identity, hosts, self.folder(identity.name), lifetime)

    def security(self, name: str = USER.name) -> Security:
        """Returns how a process authenticates itself to the others. By default it is the user's."""
        folder = self.folder(name)
        return Security(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")

    def options(self, name: str = USER.name) -> list[str]:
        """Returns the flags that name the files of `security`."""
        security = self.security(name)
        files = {"ca": security.ca, "cert": security.certificate, "key": security.key}
        return [part for flag, path in files.items() for part in (f"--tls-{flag}", str(path))]

    def folder(self, name: str) -> Path:
        """Returns the folder with the certificate of a holder: ca.pem, cert.pem and key.pem."""
        return self._folder / "issued" / name
