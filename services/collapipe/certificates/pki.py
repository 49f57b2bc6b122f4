"""Creates and reads keys, certificates and certificate signing requests.

No other module knows the contents of a certificate.
"""

import datetime
import hashlib
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from collapipe.certificates.identity import OF_THIS_MACHINE, PEOPLE, Identity, Role
from collapipe.errors import InvalidInputError, NotPermittedError

Clock = Callable[[], datetime.datetime]
"""Returns the present time in UTC."""

MAX_REQUEST_BYTES = 4096
"""An ordinary signing request has about 300 bytes."""

_BACKDATED = datetime.timedelta(days=1)
"""Certificates start this much earlier, because a box's clock may be late until it has synchronised."""

_RENEWED_FROM = 2 / 3
"""Share of its life after which a certificate is renewed."""

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""The exceptions that `cryptography` raises for malformed data."""


@dataclass(frozen=True)
class Request:
    """A signing request, after its signature has proven that the sender has the private key."""

    public_key: ec.EllipticCurvePublicKey
    identities: tuple[str, ...]
    """The requested identities, as URIs."""
    hosts: frozenset[str]
    """The requested DNS names and IP addresses."""


@dataclass(frozen=True)
class Chain:
    """The certificate of a holder, and that of the issuing authority, which has signed it. The root has signed the latter."""

    certificate: x509.Certificate
    issuer: x509.Certificate

    @property
    def pem(self) -> bytes:
        """The content of `cert.pem`: both as PEM."""
        return pem(self.certificate) + pem(self.issuer)

    def check(self, root: x509.Certificate, now: datetime.datetime) -> None:
        """Refuses a chain that does not end at a root, or is not valid now; raises `NotPermittedError` with the reason."""
        # The depth counts the certificates between the two ends.
        policy = PolicyBuilder().store(Store([root])).time(now).max_chain_depth(1)
        try:
            policy.build_client_verifier().verify(self.certificate, [self.issuer])
        except VerificationError as error:
            check_issuer(self.issuer, root, now)
            _check_valid(self.certificate, "the certificate", now)
            raise NotPermittedError(f"the certificate does not count ({error})") from None
        except ValueError as error:  # Some fields are parsed only now.
            raise NotPermittedError(
                f"the certificate is damaged ({error}): issue another one"
            ) from None


@dataclass(frozen=True)
class HolderCertificate:
    """A certificate and its issuing authority, with the identity of its holder."""

    identity: Identity
    chain: Chain

    @property
    def certificate(self) -> x509.Certificate:
        """That of the holder."""
        return self.chain.certificate

    @property
    def hosts(self) -> frozenset[str]:
        """The result of `hosts_of` for the certificate."""
        return hosts_of(self.certificate)

    @property
    def expires(self) -> datetime.datetime:
        """End of its validity."""
        return self.certificate.not_valid_after_utc

    def is_due(self, now: datetime.datetime) -> bool:
        """Returns whether to renew it. This is early enough for several failed attempts before it expires."""
        born = self.certificate.not_valid_before_utc
        return now >= born + _RENEWED_FROM * (self.expires - born)


def utc_now() -> datetime.datetime:
    """Returns the present time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Creates a private key on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes = b"") -> bytes:
    """Returns a key as PEM, encrypted if there is a passphrase."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def read_key(pem: bytes, passphrase: bytes = b"") -> ec.EllipticCurvePrivateKey:
    """Reads the PEM of `key_pem`. Raises `InvalidInputError` for anything else, or if the passphrase is wrong."""
    try:
        key = serialization.load_pem_private_key(pem, passphrase or None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        kind = "key that this passphrase opens" if passphrase else "unencrypted key"
        raise InvalidInputError(f"not a PEM file with a {kind} ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInputError("not an elliptic-curve key, which `collapipe certs` makes")
    return key


def pem(certificate: x509.Certificate) -> bytes:
    """Returns a certificate as PEM, the form in files."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def der(certificate: x509.Certificate) -> bytes:
    """Returns a certificate as DER, the form in messages."""
    return certificate.public_bytes(serialization.Encoding.DER)


def read_certificate(data: bytes) -> x509.Certificate:
    """Reads a certificate in PEM or DER. Raises `InvalidInputError` for anything else."""
    try:
        if data.startswith(b"-----"):
            return x509.load_pem_x509_certificate(data)
        return x509.load_der_x509_certificate(data)
    except UNREADABLE as error:
        raise InvalidInputError(f"not a certificate ({error})") from None


def read_chain(data: bytes) -> Chain:
    """Reads the PEM of a `Chain`. Raises `InvalidInputError` for anything else."""
    try:
        found = x509.load_pem_x509_certificates(data)
    except UNREADABLE as error:
        raise InvalidInputError(f"not certificates in PEM ({error})") from None
    if len(found) != 2:
        raise InvalidInputError(
            f"there must be 2 certificates, the holder's and its issuing authority's, not {len(found)} (older versions of "
            "CollaPipe made 1): issue the certificate again with `collapipe certs issue`"
        )
    return Chain(*found)


def build_root(
    key: ec.EllipticCurvePrivateKey, now: datetime.datetime, lifetime: datetime.timedelta
) -> x509.Certificate:
    """Creates the self-signed certificate of a root."""
    subject = _subject("CollaPipe root")
    builder = _builder(key.public_key(), subject, now, now + lifetime).issuer_name(subject)
    return _as_authority(builder, 1).sign(key, hashes.SHA256())


def build_issuer(
    public_key: ec.EllipticCurvePublicKey,
    root: tuple[ec.EllipticCurvePrivateKey, x509.Certificate],
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.Certificate:
    """Creates the certificate of an issuing authority, which may sign no other authority.

    Args:
        root: The key and the certificate of the root.
    """
    root_key, root_certificate = root
    ends = min(now + lifetime, root_certificate.not_valid_after_utc)
    builder = (
        _builder(public_key, _subject("CollaPipe issuing authority"), now, ends)
        .issuer_name(root_certificate.subject)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()),
            critical=False,
        )
    )
    return _as_authority(builder, 0).sign(root_key, hashes.SHA256())


def build_certificate(
    identity: Identity,
    hosts: Iterable[str],
    public_key: ec.EllipticCurvePublicKey,
    authority: tuple[ec.EllipticCurvePrivateKey, x509.Certificate],
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.Certificate:
    """Creates the certificate of a process.

    Args:
        hosts: DNS names and IP addresses of the holder, besides its name and `OF_THIS_MACHINE`.
        authority: The key and the certificate of the issuing authority.
        not_before: Start of its validity; a day is subtracted for late clocks.
        not_after: End of its validity, unless that of the authority is earlier.
    """
    authority_key, authority_certificate = authority
    uri = x509.UniformResourceIdentifier(identity.uri)
    names: list[x509.GeneralName] = [uri]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role not in PEOPLE:  # A person must not be able to act as a server.
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
    """Returns the result that `hosts_of` has for a certificate created for these hosts."""
    if identity.role in PEOPLE:
        return frozenset()
    return (frozenset(hosts) | {identity.name}) - OF_THIS_MACHINE


def build_request(
    identity: Identity, hosts: Iterable[str], key: ec.EllipticCurvePrivateKey
) -> bytes:
    """Returns a PKCS #10 signing request in DER, for an identity and for hosts besides its name."""
    names = [x509.UniformResourceIdentifier(identity.uri), *map(_general_name, sorted(hosts))]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_subject(identity.name))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.DER)


def read_request(data: bytes) -> Request:
    """Reads a signing request, which may come from anybody.

    Raises:
        InvalidInputError: The request is malformed, asks for anything but names, or has a wrong signature.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidInputError(
            f"the signing request has {len(data)} bytes: at most {MAX_REQUEST_BYTES} are allowed"
        )
    try:
        request = x509.load_der_x509_csr(data)
        public_key = request.public_key()
        # Check the key before the signature: with other kinds of keys, the check may take long.
        if not (
            isinstance(public_key, ec.EllipticCurvePublicKey)
            and isinstance(public_key.curve, ec.SECP256R1)
        ):
            raise InvalidInputError("the key of a signing request must be on the curve P-256")
        if not request.is_signature_valid:
            raise InvalidInputError("the signing request is signed with another key than its own")
        extensions = list(request.extensions)
    except UNREADABLE as error:
        raise InvalidInputError(f"not a signing request ({error})") from None
    others = [
        e.oid.dotted_string
        for e in extensions
        if not isinstance(e.value, x509.SubjectAlternativeName)
    ]
    if others:
        raise InvalidInputError(
            f"the signing request asks for the extensions {', '.join(others)}: only the authority sets them"
        )
    uris, hosts = _uris_and_hosts(name for e in extensions for name in e.value)
    return Request(public_key, tuple(uris), hosts)


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Returns the identity in a certificate; `None` if it has no valid one."""
    return Identity.from_uris(_uris_and_hosts(_alternative_names(certificate))[0])


def hosts_of(certificate: x509.Certificate) -> frozenset[str]:
    """Returns the hosts in a certificate, without `OF_THIS_MACHINE` and without the names of roles."""
    hosts = _uris_and_hosts(_alternative_names(certificate))[1]
    return hosts - OF_THIS_MACHINE - {role.server_name for role in Role}


def key_sha256(holder: x509.Certificate | ec.EllipticCurvePublicKey) -> bytes:
    """Returns the SHA-256 of a public key, or of that of a certificate, as a SubjectPublicKeyInfo in DER."""
    key = public_key_of(holder) if isinstance(holder, x509.Certificate) else holder
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(encoding, form)).digest()


def is_of_key(certificate: x509.Certificate, key: ec.EllipticCurvePublicKey) -> bool:
    """Returns whether a certificate belongs to a key."""
    return certificate.public_key() == key


def check_issuer(issuer: x509.Certificate, root: x509.Certificate, now: datetime.datetime) -> None:
    """Refuses an issuing authority that the root has not made, or that is not valid now; raises `NotPermittedError` with the reason."""
    try:
        issuer.verify_directly_issued_by(root)
        is_authority = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        raise NotPermittedError(
            "its issuing authority is of another root than that of this machine"
        ) from None
    if not is_authority:
        raise NotPermittedError("it is signed with a certificate that is no authority")
    _check_valid(issuer, "the issuing authority", now)


def public_key_of(holder: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Returns the key of a certificate. Raises `InvalidInputError` if `collapipe certs` does not make such keys."""
    key = holder.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInputError("not an elliptic-curve key, which `collapipe certs` makes")
    return key


def lifetime_of(certificate: x509.Certificate) -> datetime.timedelta:
    """Returns the lifetime for which a certificate was created."""
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc - _BACKDATED


def _check_valid(certificate: x509.Certificate, what: str, now: datetime.datetime) -> None:
    """Refuses a certificate that is not valid now; raises `NotPermittedError`."""
    born, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not born <= now <= ends:
        raise NotPermittedError(
            f"{what} is not valid now: it is from {born:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, and the clock of this machine "
            f"says {now:%Y-%m-%d %H:%M}: renew it, or set the clock"
        )


def _uris_and_hosts(names: Iterable[x509.GeneralName]) -> tuple[list[str], frozenset[str]]:
    """Splits names into URIs and hosts. Raises `InvalidInputError` for any other kind of name."""
    uris, hosts = [], []
    for name in names:
        if isinstance(name, x509.UniformResourceIdentifier):
            uris.append(name.value)
        elif isinstance(name, x509.DNSName | x509.IPAddress):
            hosts.append(str(name.value))
        else:
            raise InvalidInputError(
                f"a name of the kind {type(name).__name__} is not allowed: use DNS names and IP addresses"
            )
    return uris, frozenset(hosts)


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


def _as_authority(builder: x509.CertificateBuilder, path_length: int) -> x509.CertificateBuilder:
    constraints = x509.BasicConstraints(ca=True, path_length=path_length)
    usage = _key_usage(signs_certificates=True)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


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
