"""Certificates and requests for them, made and read: the only module that knows what is in one."""

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from collapipe.certificates.identity import Identity, Role
from collapipe.errors import InvalidInputError

OF_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
"""Every server is asked by the health check beside it."""

MAX_REQUEST_BYTES = 4096
"""A request of ours has about 300."""

_BACKDATED = datetime.timedelta(days=1)
"""A box without a clock of its own is behind the others until it has asked for the time."""

_RENEWED_FROM = 2 / 3
"""Part of its life after which a certificate is renewed."""

_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises at data of strangers."""


@dataclass(frozen=True)
class Request:
    """What somebody who wants a certificate asks for, with a proof that the key is theirs."""

    public_key: ec.EllipticCurvePublicKey
    identities: tuple[str, ...]
    """URIs."""
    hosts: frozenset[str]
    """DNS names and addresses."""


def utc_now() -> datetime.datetime:
    """The time, as certificates state it."""
    return datetime.datetime.now(datetime.timezone.utc)


def is_due(born: datetime.datetime, expires: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether a certificate should be renewed: early enough that several attempts may fail."""
    return now >= born + _RENEWED_FROM * (expires - born)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Makes a key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key as a file has it, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Reads what `key_pem` writes; raises `InvalidInputError`."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInputError(f"no unencrypted key in PEM ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInputError("not a key of an elliptic curve, as `collapipe certs` makes it")
    return key


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as a file has it."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def der(certificate: x509.Certificate) -> bytes:
    """A certificate as messages carry it."""
    return certificate.public_bytes(serialization.Encoding.DER)


def read_certificate(data: bytes) -> x509.Certificate:
    """Reads a certificate, PEM or DER; raises `InvalidInputError`."""
    try:
        if data.startswith(b"-----"):
            return x509.load_pem_x509_certificate(data)
        return x509.load_der_x509_certificate(data)
    except _UNREADABLE as error:
        raise InvalidInputError(f"not a certificate ({error})") from None


def build_authority(
    key: ec.EllipticCurvePrivateKey, now: datetime.datetime, lifetime: datetime.timedelta
) -> x509.Certificate:
    """Makes the certificate of an authority, signed by itself."""
    subject = _subject("CollaPipe authority")
    return (
        _builder(key.public_key(), subject, now, now + lifetime)
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def build_certificate(
    identity: Identity,
    hosts: Iterable[str],
    public_key: ec.EllipticCurvePublicKey,
    authority: tuple[ec.EllipticCurvePrivateKey, x509.Certificate],
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.Certificate:
    """Makes the certificate of a process.

    Args:
        identity: Who it is.
        hosts: DNS names and addresses by which others may reach it, besides its name and this machine's own.
        public_key: Of its key.
        authority: Key and certificate of who signs.
        not_before: Start of its validity.
        not_after: Its end; cut at that of the authority's certificate.
    """
    authority_key, authority_certificate = authority
    uri = x509.UniformResourceIdentifier(identity.uri)
    names: list[x509.GeneralName] = [uri]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role is not Role.CLIENT:  # which serves nothing, and shall not be able to
        served = sorted(hosts_for(identity, hosts) | OF_THIS_MACHINE)
        names += [x509.DNSName(identity.role.server_name), *map(_general_name, served)]
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    issuer_key = authority_certificate.public_key()
    assert isinstance(issuer_key, ec.EllipticCurvePublicKey)
    return (
        _builder(
            public_key,
            _subject(identity.name),
            not_before,
            min(not_after, authority_certificate.not_valid_after_utc),
        )
        .issuer_name(authority_certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )


def hosts_for(identity: Identity, hosts: Iterable[str]) -> frozenset[str]:
    """What `hosts_of` tells of a certificate that was made for these hosts."""
    if identity.role is Role.CLIENT:
        return frozenset()
    return (frozenset(hosts) | {identity.name}) - OF_THIS_MACHINE


def build_request(
    identity: Identity, hosts: Iterable[str], key: ec.EllipticCurvePrivateKey
) -> bytes:
    """Makes a request, DER: who one wants to be, and by which hosts others shall reach one."""
    names = [x509.UniformResourceIdentifier(identity.uri), *map(_general_name, sorted(hosts))]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_subject(identity.name))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.DER)


def read_request(data: bytes) -> Request:
    """Reads a request of anybody.

    Raises:
        InvalidInputError: It is none, asks for more than names, or was not made by who has the key.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidInputError(
            f"a request for a certificate of {len(data)} bytes: at most {MAX_REQUEST_BYTES} are read"
        )
    try:
        request = x509.load_der_x509_csr(data)
        public_key = request.public_key()
        # looked at before it is used: what the signature costs is up to the key
        if not (
            isinstance(public_key, ec.EllipticCurvePublicKey)
            and isinstance(public_key.curve, ec.SECP256R1)
        ):
            raise InvalidInputError("a request for a certificate needs a key on the curve P-256")
        if not request.is_signature_valid:
            raise InvalidInputError("a request for a certificate was signed with another key")
        extensions = list(request.extensions)
    except _UNREADABLE as error:
        raise InvalidInputError(f"not a request for a certificate ({error})") from None
    others = [
        e.oid.dotted_string
        for e in extensions
        if not isinstance(e.value, x509.SubjectAlternativeName)
    ]
    if others:
        raise InvalidInputError(
            f"a request for a certificate asks for the extensions {', '.join(others)}: the authority chooses them"
        )
    names = [name for e in extensions for name in e.value]
    uris, hosts = _sorted_out(names)
    return Request(public_key, tuple(uris), frozenset(hosts))


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Who a certificate is of; `None` where it has no role."""
    return Identity.from_uris(_sorted_out(_alternative_names(certificate))[0])


def hosts_of(certificate: x509.Certificate) -> frozenset[str]:
    """The hosts that a certificate has, without those of every machine and of roles."""
    hosts = _sorted_out(_alternative_names(certificate))[1]
    of_roles = {role.server_name for role in Role}
    return frozenset(hosts) - OF_THIS_MACHINE - of_roles


def is_of_key(certificate: x509.Certificate, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether a certificate is of a key."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return certificate.public_key().public_bytes(*form) == key.public_bytes(*form)


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def lifetime_of(certificate: x509.Certificate) -> datetime.timedelta:
    """How long a certificate was meant to last when it was made."""
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc - _BACKDATED


def _sorted_out(names: Iterable[x509.GeneralName]) -> tuple[list[str], list[str]]:
    """The URIs, and the hosts; raises `InvalidInputError` at any other name."""
    uris, hosts = [], []
    for name in names:
        if isinstance(name, x509.UniformResourceIdentifier):
            uris.append(name.value)
        elif isinstance(name, x509.DNSName | x509.IPAddress):
            hosts.append(str(name.value))
        else:
            raise InvalidInputError(
                f"a name of the kind {type(name).__name__}, which no host here has: use DNS names and addresses"
            )
    return uris, hosts


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return list(extension.value)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    public_key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    now: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
