"""Checks the certificate of a box as its peers will: signature, role, names and dates."""

import errno
import os
import stat
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CertificateFacts:
    """The contents of the three files of a box.

    Args:
        role: The role that the certificate gives to the box; empty if it gives none.
        addresses: The host names and IP addresses that the certificate names.
        key_fits: Whether the key belongs to the certificate.
        of_authority: Whether the authority signed the certificate.
        key_mode: Permissions of the key file.
    """

    role: str
    name: str
    addresses: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    key_fits: bool
    of_authority: bool
    key_mode: int = 0o600


def read_certificate(ca: Path, certificate: Path, key: Path) -> CertificateFacts | str:
    """Reads the files. If one cannot be read, returns the reason in words."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        from collapipe.certificates import pki
    except ImportError:
        return "it cannot be read without the extra `certs`: pip install cryptography"
    path = ca
    try:
        authorities = x509.load_pem_x509_certificates(ca.read_bytes())
        path = certificate
        own = pki.read_certificate(certificate.read_bytes())
        identity, hosts = pki.identity_of(own), pki.hosts_of(own)
        path = key
        private_key = load_pem_private_key(key.read_bytes(), password=None)
        key_mode = stat.S_IMODE(key.stat().st_mode)
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (CollapipeError, TypeError, ValueError) as error:  # not PEM, or an encrypted key
        return f"{path}: {str(error).splitlines()[0]}"
    return CertificateFacts(
        role=identity.role.value if identity else "",
        name=identity.name if identity else "",
        addresses=tuple(sorted(hosts)),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        key_fits=private_key.public_key() == own.public_key(),
        of_authority=any(pki.is_signed_by(own, authority) for authority in authorities),
        key_mode=key_mode,
    )


def check_certificate(
    facts: CertificateFacts | str,
    *,
    role: str = "",
    advertised_host: str = "",
    now: datetime | None = None,
) -> list[Check]:
    """Judges a certificate as its peers will.

    Args:
        facts: The result of `read_certificate`.
        role: The role that the box needs; empty for any.
        advertised_host: The name or address that peers use for the box; empty if unknown.
        now: The current time; `None` for that of this machine's clock.
    """
    if isinstance(facts, str):
        no_permission = facts.endswith(os.strerror(errno.EACCES))
        remedy = "run this with sudo, or as the user of the service" if no_permission else _JOIN
        return [Check.fail("certificate", facts, remedy)]
    holder = f"{facts.role or 'no role'} {facts.name}".strip()
    addresses = ", ".join(facts.addresses) or "no host"
    faults = [
        (not facts.key_fits, "the key is not its own", f"replace both: {_JOIN}"),
        (
            not facts.of_authority,
            "not signed by the authority of --tls-ca",
            f"take ca.pem and certificate from one deployment: {_JOIN}",
        ),
        (
            role != "" and facts.role != role,
            f"peers will not accept it as {role}",
            f"delete its folder, and get a certificate for the role {role}: {_JOIN}",
        ),
        (
            advertised_host != "" and advertised_host not in facts.addresses,
            f"names {addresses}, but peers call this machine {advertised_host}",
            f"set advertise to one of the certificate's names, or get a certificate that names {advertised_host}: "
            f"{_JOIN} --advertise {advertised_host}:PORT",
        ),
    ]
    checks = [
        Check.fail("certificate", f"{holder}: {fault}", remedy)
        for is_present, fault, remedy in faults
        if is_present
    ]
    checks.append(_check_dates(holder, facts, now or datetime.now(timezone.utc)))
    if facts.key_mode & 0o077:
        found = f"other users may read it (mode {facts.key_mode:o})"
        checks.append(
            Check.warn("key", found, "chmod 600 KEY, and make the service's user its owner")
        )
    return checks


def _check_dates(holder: str, facts: CertificateFacts, now: datetime) -> Check:
    if now < facts.not_before:
        return Check.fail(
            "certificate",
            f"{holder}: valid from {facts.not_before:%Y-%m-%d %H:%M} UTC, but this clock says {now:%Y-%m-%d %H:%M}",
            "set the clock: sudo timedatectl set-ntp true",
        )
    left = facts.not_after - now
    end = f"{facts.not_after:%Y-%m-%d}"
    if left < timedelta(0):
        return Check.fail("certificate", f"{holder}: ended on {end}", f"replace it: {_JOIN}")
    found = f"{holder}: valid for {left.days} days, until {end}"
    if left < _WARN_BEFORE_END:
        return Check.warn("certificate", found, f"renew it before that: {_RENEW}")
    return Check.ok("certificate", found)
