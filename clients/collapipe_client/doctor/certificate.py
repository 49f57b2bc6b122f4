"""The certificate of a box: is it one that peers will accept, for how long, and as whom."""

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
    "make a token where the authority is (`collapipe certs token`), and here: collapipe join TOKEN"
)
_RENEW = (
    "here: sudo collapipe renew --now (with certificates of `collapipe certs issue`: issue again)"
)


@dataclass(frozen=True)
class CertificateFacts:
    """What the three files of a box hold.

    Args:
        role: What the certificate lets it be; empty when it does not say.
        name: Who it is.
        addresses: Host names and IP addresses by which it may be called.
        not_before: Since when it is valid.
        not_after: Until when.
        key_fits: Whether the key is the certificate's.
        of_authority: Whether the authority signed it.
        key_mode: Permissions of the key's file.
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
    """Reads the files; says in words what cannot be read."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        from collapipe.certificates import forms
    except ImportError:
        return "nobody can look into it without the extra certs: pip install cryptography"
    path = ca
    try:
        authorities = x509.load_pem_x509_certificates(ca.read_bytes())
        path = certificate
        own = forms.read_certificate(certificate.read_bytes())
        identity, hosts = forms.identity_of(own), forms.hosts_of(own)
        path = key
        secret = load_pem_private_key(key.read_bytes(), password=None)
        key_mode = stat.S_IMODE(key.stat().st_mode)
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (CollapipeError, TypeError, ValueError) as error:  # an encrypted key, or no PEM
        return f"{path}: {str(error).splitlines()[0]}"
    return CertificateFacts(
        role=identity.role.value if identity else "",
        name=identity.name if identity else "",
        addresses=tuple(sorted(hosts)),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        key_fits=secret.public_key() == own.public_key(),
        of_authority=any(forms.is_signed_by(own, authority) for authority in authorities),
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
        facts: As `read_certificate` answers.
        role: What the box is to be; empty for any.
        advertised_host: By which name or address peers call it; empty when that is not known.
        now: The time; by default that of this machine's clock.
    """
    name = "certificate"
    if isinstance(facts, str):
        is_hidden = facts.endswith(os.strerror(errno.EACCES))
        remedy = "run this with sudo, or as the user of the service" if is_hidden else _JOIN
        return [Check(name, "fail", facts, remedy)]
    now = now or datetime.now(timezone.utc)
    found = f"{facts.role or 'no role'} {facts.name}".strip()
    checks = []
    if not facts.key_fits:
        checks.append(
            Check(name, "fail", f"{found}: the key is not its own", f"replace both: {_JOIN}")
        )
    if not facts.of_authority:
        checks.append(
            Check(
                name,
                "fail",
                f"{found}: not signed by the authority of --tls-ca",
                f"take ca.pem and certificate from one deployment: {_JOIN}",
            )
        )
    if role and facts.role != role:
        checks.append(
            Check(
                name,
                "fail",
                f"{found}: peers will not accept it as {role}",
                f"delete its folder, and get one for the role {role}: {_JOIN}",
            )
        )
    if advertised_host and advertised_host not in facts.addresses:
        checks.append(
            Check(
                name,
                "fail",
                f"{found}: names {', '.join(facts.addresses) or 'no host'}, but peers call it {advertised_host}",
                f"set advertise to one of its names, or get one that names {advertised_host}: {_JOIN} --advertise "
                f"{advertised_host}:PORT",
            )
        )
    checks.append(_check_dates(name, found, facts, now))
    if facts.key_mode & 0o077:
        checks.append(
            Check(
                "key",
                "warn",
                f"others may read it (mode {facts.key_mode:o})",
                "chmod 600 KEY, and let the service's user own it",
            )
        )
    return checks


def _check_dates(name: str, found: str, facts: CertificateFacts, now: datetime) -> Check:
    if now < facts.not_before:
        return Check(
            name,
            "fail",
            f"{found}: valid from {facts.not_before:%Y-%m-%d %H:%M} UTC, and this clock says {now:%Y-%m-%d %H:%M}",
            "set the clock: sudo timedatectl set-ntp true",
        )
    left = facts.not_after - now
    if left < timedelta(0):
        return Check(
            name, "fail", f"{found}: ended on {facts.not_after:%Y-%m-%d}", f"replace it: {_JOIN}"
        )
    until = f"{found}: valid for {left.days} days, until {facts.not_after:%Y-%m-%d}"
    if left < _WARN_BEFORE_END:
        return Check(name, "warn", until, f"renew it before that: {_RENEW}")
    return Check(name, "ok", until)
