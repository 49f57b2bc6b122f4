"""The folder of a root: its key, and the certificates of all issuing authorities that it has made.

Only `collapipe certs init` and `collapipe certs issuing` need it. So it can be on a machine or a medium that is not connected.
"""

import datetime
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.certificates.pki import Clock
from collapipe.certificates.private_files import (
    OWNER_ONLY,
    files_in,
    make_folder,
    read_authority_key,
    read_required,
    write_file,
)
from collapipe.certificates.revoked_keys import sign_issuers
from collapipe.errors import InvalidInputError
from collapipe.v1.enrollment_pb2 import SignedRevokedKeys

ROOT_LIFETIME = datetime.timedelta(days=3650)
ISSUER_LIFETIME = datetime.timedelta(days=730)

_CERTIFICATE, _KEY = "ca.pem", "ca-key.pem"
_LOST = "give the folder of the root with --root, or restore it from a backup"


class RootFolder:
    """Opens the folder of a root that `create` has made.

    Args:
        passphrase: That of the key; empty if the key is not encrypted.

    Raises:
        InvalidInputError: There is no root, or its files are damaged.
    """

    def __init__(self, folder: Path, clock: Clock, passphrase: bytes) -> None:
        self._clock = clock
        self.certificate = read_required(folder / _CERTIFICATE, pki.read_certificate, _LOST)
        read_key = partial(read_authority_key, passphrase=passphrase)
        self._key = read_required(folder / _KEY, read_key, _LOST)
        if not pki.is_of_key(self.certificate, self._key.public_key()):
            raise InvalidInputError(
                f"{folder / _KEY} is not the key of {folder / _CERTIFICATE}: restore both from one backup"
            )
        self._issuers = folder / "issuing"

    @classmethod
    def create(cls, folder: Path, clock: Clock, passphrase: bytes) -> "RootFolder":
        """Creates a root. The arguments are those of the class.

        Raises:
            InvalidInputError: The folder holds an authority already, or cannot be written.
        """
        make_folder(folder)
        if (folder / _CERTIFICATE).exists() or (folder / _KEY).exists():
            raise InvalidInputError(
                f"{folder} holds the key of an authority already: choose another folder with --root, or delete this one by hand if "
                "it has signed nothing yet"
            )
        key = pki.new_key()
        write_file(folder / _KEY, pki.key_pem(key, passphrase), OWNER_ONLY)
        certificate = pki.build_root(key, clock(), ROOT_LIFETIME)
        write_file(folder / _CERTIFICATE, pki.pem(certificate))
        return cls(folder, clock, passphrase)

    def make_issuer(self, public_key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Makes the certificate of an issuing authority.

        Raises:
            InvalidInputError: The root has expired, or the folder cannot be written.
        """
        now, ends = self._clock(), self.certificate.not_valid_after_utc
        if ends <= now:
            raise InvalidInputError(
                f"the root expired at {ends:%Y-%m-%d}: make a new authority in a new folder, and new certificates"
            )
        issuer = pki.build_issuer(public_key, (self._key, self.certificate), now, ISSUER_LIFETIME)
        # It is recorded before anybody can use it, so that it can always be revoked.
        make_folder(self._issuers)
        write_file(self._issuers / f"{issuer.serial_number:x}.pem", pki.pem(issuer))
        return issuer

    def revoke_all_but(self, kept: x509.Certificate) -> SignedRevokedKeys:
        """Returns a list without keys that revokes every issuing authority of this root but one."""
        made = [
            read_required(path, pki.read_certificate, "restore it from a backup")
            for path in files_in(self._issuers, ".pem")
        ]
        keys = [pki.key_sha256(one) for one in made if one != kept]
        return sign_issuers(keys, self._key)
