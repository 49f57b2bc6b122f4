"""Checks the certificate of a box like its peers do: signature, role, names and dates."""

import errno
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

from collapipe.errors import CollapipeError
from collapipe_client.doctor.check import Check

_WARN_BEFORE_END = timedelta(days=30)
_JOIN = (
    "make a token on the machine of the authority (`collapipe certs token`), and run here: "
    "collapipe join TOKEN"
)
_RENEW = (
    "sudo collapipe renew --now (a certificate of `collapipe certs issue` is issued again instead)"
)


def check_certificate(
    ca_file: Path,
    certificate_file: Path,
    key_file: Path,
    *,
    role: str = "",
    advertised_host: str = "",
    now: datetime | None = None,
) -> list[Check]:
    """Checks the certificate and the key of a box.

    Args:
        role: The role that the box needs; empty for any.
        advertised_host: The name or address that peers use for the box; empty if unknown.
        now: `None` for the time of this machine's clock.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        from collapipe.certificates import pki
    except ImportError:
        found = "it cannot be read without the extra `certs`"
        return [Check.fail("certificate", found, "pip install cryptography")]
    path = ca_file
    try:
        authorities = x509.load_pem_x509_certificates(ca_file.read_bytes())
        path = certificate_file
        certificate = pki.read_certificate(certificate_file.read_bytes())
        identity, hosts = pki.identity_of(certificate), pki.hosts_of(certificate)
        path = key_file
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        key_mode = stat.S_IMODE(key_file.stat().st_mode)
    except OSError as error:
        no_permission = error.errno == errno.EACCES
        remedy = "run this with sudo, or as the user of the service" if no_permission else _JOIN
        return [Check.fail("certificate", f"{path}: {error.strerror}", remedy)]
    except (CollapipeError, TypeError, ValueError) as error:  # not PEM, or an encrypted key
        return [Check.fail("certificate", f"{path}: {str(error).splitlines()[0]}", _JOIN)]

    holder = f"{identity.role.value} {identity.name}" if identity else "no role"
    faults = [
        (
            key.public_key() != certificate.public_key(),
            "the key is not its own",
            f"replace both: {_JOIN}",
        ),
        (
            not any(pki.is_signed_by(certificate, authority) for authority in authorities),
            "not signed by the authority of --tls-ca",
            f"take ca.pem and certificate from one deployment: {_JOIN}",
        ),
        (
            role != "" and (identity is None or identity.role.value != role),
            f"peers will not accept it as {role}",
            f"delete its folder, and get a certificate for the role {role}: {_JOIN}",
        ),
        (
            advertised_host != "" and advertised_host not in hosts,
            f"names {', '.join(sorted(hosts)) or 'no host'}, but peers call this machine {advertised_host}",
            f"set advertise to one of the certificate's names, or get a certificate that names {advertised_host}: "
            f"{_JOIN} --advertise {advertised_host}:PORT",
        ),
    ]
    checks = [
        Check.fail("certificate", f"{holder}: {fault}", remedy)
        for is_present, fault, remedy in faults
        if is_present
    ]
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    checks.append(_check_dates(holder, begin, end, now or datetime.now(timezone.utc)))
    if key_mode & 0o077:
        found = f"other users may read it (mode {key_mode:o})"
        remedy = "chmod 600 KEY, and make the service's user its owner"
        checks.append(Check.warn("key", found, remedy))
    return checks


def _check_dates(holder: str, begin: datetime, end: datetime, now: datetime) -> Check:
    if now < begin:
        return Check.fail(
            "certificate",
            f"{holder}: valid from {begin:%Y-%m-%d %H:%M} UTC, but this clock says {now:%Y-%m-%d %H:%M}",
            "set the clock: sudo timedatectl set-ntp true",
        )
    left = end - now
    if left < timedelta(0):
        found = f"{holder}: ended on {end:%Y-%m-%d}"
        return Check.fail("certificate", found, f"replace it: {_JOIN}")
    found = f"{holder}: valid for {left.days} days, until {end:%Y-%m-%d}"
    if left < _WARN_BEFORE_END:
        return Check.warn("certificate", found, f"renew it before that: {_RENEW}")
    return Check.ok("certificate", found)
