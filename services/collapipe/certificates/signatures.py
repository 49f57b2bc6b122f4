"""Signs data with the key of a certificate, and checks such signatures."""

import hashlib
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from collapipe.certificates.identity import Role
from collapipe.certificates.pki import (
    UNREADABLE,
    HolderCertificate,
    identity_of,
    public_key_of,
    read_certificate,
    read_chain,
    read_key,
    utc_now,
)
from collapipe.errors import InvalidInputError, NotPermittedError

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_OF_DIGEST = ec.ECDSA(Prehashed(hashes.SHA256()))
_MOST_CERTIFICATE_BYTES = 16384
"""Two certificates in PEM have about 1,500 bytes. One with many hosts has more."""
GRANT = "a grant"
MASKING_KEYS = "a set of masking keys"
_CONTEXT = "CollaPipe: %s, signed by the key of a certificate, outside of TLS\0"
"""Comes before the signed bytes, with what they are. In a handshake of TLS 1.2, a server also signs data that begins with 32 bytes of
its peer's choice. This text is longer, so no peer can get a signature that counts here."""


class Signer:
    """A key, and `cert.pem` with its certificate, both in PEM.

    Raises:
        InvalidInputError: They are not of the kinds that `collapipe certs` makes.
    """

    def __init__(self, key: bytes, certificate: bytes) -> None:
        self._key = read_key(key)
        self.certificate = read_chain(certificate).pem
        """Followed by that of the issuing authority, in PEM."""

    def sign(self, data: bytes, kind: str = GRANT) -> bytes:
        """Signs data of a kind, such as `GRANT`. The signature counts for no other kind."""
        return self._key.sign(_with_context(data, kind), _ALGORITHM)


def check_signature(
    data: bytes, signature: bytes, certificate: bytes, ca: bytes, role: Role, kind: str = GRANT
) -> HolderCertificate:
    """Refuses data that nobody with a role has signed. Returns who has signed it.

    Args:
        certificate: Of the signer, followed by that of the issuing authority, in PEM.
        ca: Certificate of the root, in PEM.
        kind: As in `Signer.sign`.

    Raises:
        NotPermittedError: The signature is wrong, or the certificate of the signer is missing, too long, of another role or root, or
            not valid now.
    """
    signer = _signer(certificate, kind)
    if signer.identity.role is not role:
        raise NotPermittedError(f"{signer.identity} has signed {kind}, but only a {role.value} may")
    try:
        signer.chain.check(read_certificate(ca), utc_now())
    except NotPermittedError as error:
        raise NotPermittedError(
            f"{signer.identity} has signed {kind}, but {error}: all hosts need valid certificates of one authority and right clocks"
        ) from None
    digest = hashlib.sha256(_with_context(data, kind)).digest()
    try:
        _verify(digest, signature, signer.chain.pem)
    except InvalidSignature:
        raise NotPermittedError(
            f"the signature of {signer.identity} does not fit {kind}, which was changed or forged: find the host that sent it"
        ) from None
    return signer


def _signer(certificate: bytes, kind: str) -> HolderCertificate:
    """Returns the signer, whose chain is not checked yet."""
    if len(certificate) > _MOST_CERTIFICATE_BYTES:
        raise NotPermittedError(
            f"{kind} has a certificate of {len(certificate)} bytes, but those of `collapipe certs` have at most "
            f"{_MOST_CERTIFICATE_BYTES}: find the host that sent it"
        )
    try:
        chain = read_chain(certificate)
        identity, key = identity_of(chain.certificate), chain.certificate.public_key()
    except (InvalidInputError, *UNREADABLE) as error:
        raise NotPermittedError(
            f"{kind} has no certificate of its signer ({error}): update the sender, or issue its certificate again"
        ) from None
    if identity is None or not isinstance(key, ec.EllipticCurvePublicKey):
        raise NotPermittedError(
            f"{kind} is signed with a certificate without a role: issue that certificate again with `collapipe certs issue`"
        )
    return HolderCertificate(identity, chain)


# Every push and every session of a round shows the grant of its cluster, and a deployment has at most 1,000 clusters. What is kept is
# short, and its chain ends at the root, so that no caller can fill the memory.
@lru_cache(2048)
def _verify(digest: bytes, signature: bytes, chain_pem: bytes) -> None:
    """Raises `InvalidSignature` unless the holder of a chain has signed the data with a SHA-256."""
    public_key_of(read_chain(chain_pem).certificate).verify(signature, digest, _OF_DIGEST)


def _with_context(data: bytes, kind: str) -> bytes:
    return (_CONTEXT % kind).encode() + data
