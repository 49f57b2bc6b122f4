"""Checks the certificate of a box like its peers do, then its names, its remaining life and the mode of its key."""

import errno
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

from collapipe.certificates import pki
from collapipe.certificates.identity import OF_THIS_MACHINE
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.rpc import Security
from collapipe_client.doctor.check import Check

_WARN_BEFORE_END = timedelta(days=30)
_JOIN = (
    "make a token on the machine of the authority (`collapipe certs token`), and run here: "
    "collapipe join TOKEN"
)
_RENEW = (
    "sudo collapipe renew --now (a certificate of `collapipe certs issue` is issued again instead)"
)

_NEW_ISSUER = "collapipe certs issuing DIR --root FOLDER, where the authority and its root are"


def check_certificate(
    ca_file: Path,
    certificate_file: Path,
    key_file: Path,
    *,
    role: str = "",
    advertised_host: str = "",
) -> list[Check]:
    """Checks the certificate and the key of a box.

    Args:
        role: The role that the box needs; empty for any.
        advertised_host: The name or address that peers use for the box; empty if unknown.
    """
    for path in (ca_file, certificate_file, key_file):
        try:
            path.read_bytes()
        except OSError as error:
            no_permission = error.errno == errno.EACCES
            remedy = "run this with sudo, or as the user of the service" if no_permission else _JOIN
            return [Check.fail("certificate", f"{path}: {error.strerror}", remedy)]
    try:
        presented = Security(ca_file, certificate_file, key_file).presented()
        assert presented is not None
        chain = pki.read_chain(certificate_file.read_bytes())
        hosts = pki.hosts_of(chain.certificate)
    except InvalidInputError as error:
        return [Check.fail("certificate", str(error), f"replace all three files: {_JOIN}")]
    except WrongStateError as error:
        remedy = f"if the clock is wrong, sudo timedatectl set-ntp true; else replace it: {_JOIN}"
        return [Check.fail("certificate", str(error), remedy)]

    identity, checks = presented.identity, []
    holder = f"{identity.role.value} {identity.name}"
    if role not in ("", identity.role.value):
        found = f"{holder}: peers will not accept it as {role}"
        remedy = f"delete its folder, and get a certificate for the role {role}: {_JOIN}"
        checks.append(Check.fail("certificate", found, remedy))
    if advertised_host and advertised_host not in hosts | OF_THIS_MACHINE:
        names = ", ".join(sorted(hosts)) or "no host"
        found = f"{holder}: names {names}, but peers call this machine {advertised_host}"
        remedy = (
            f"set advertise to one of the certificate's names, or get a certificate that names {advertised_host}: "
            f"{_JOIN} --advertise {advertised_host}:PORT"
        )
        checks.append(Check.fail("certificate", found, remedy))
    left = presented.expires - datetime.now(timezone.utc)
    found = f"{holder}: valid for {left.days} days, until {presented.expires:%Y-%m-%d}"
    if left < _WARN_BEFORE_END:
        remedy = f"renew it before that: {_RENEW}"
        if presented.expires == chain.issuer.not_valid_after_utc:
            remedy = f"its issuing authority ends then, so first run: {_NEW_ISSUER}; then {remedy}"
        checks.append(Check.warn("certificate", found, remedy))
    else:
        checks.append(Check.ok("certificate", found))
    key_mode = stat.S_IMODE(key_file.stat().st_mode)
    if key_mode & 0o077:
        found = f"other users may read it (mode {key_mode:o})"
        remedy = "chmod 600 KEY, and make the service's user its owner"
        checks.append(Check.warn("key", found, remedy))
    return checks
