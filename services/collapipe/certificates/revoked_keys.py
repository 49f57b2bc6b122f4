"""The list of revoked keys, which the scheduler sends to all hosts. They refuse every caller whose certificate has one of these keys, or
is of a revoked issuing authority.

The list names keys and not certificates, because a renewal keeps the key. The issuing authority signs it. The revoked issuing
authorities are a part of it that only the root signs. Hosts never forget one of them, and take no list that it has signed. So a thief of
its key cannot bring back an older list.
"""

import hashlib
import threading
from collections.abc import Iterable
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from collapipe.certificates.pki import (
    UNREADABLE,
    check_issuer,
    der,
    key_sha256,
    public_key_of,
    read_certificate,
    read_chain,
    utc_now,
)
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import RevokedIssuers, RevokedKeys, SignedRevokedKeys

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_KEYS = b"collapipe revoked keys\0"
_ISSUERS = b"collapipe revoked issuers\0"
"""These precede the signed bytes, so that nothing else that an authority signs can be taken for a list."""


class RevokedKeyList:
    """Keeps the newest list that this process has received. It is empty at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: frozenset[bytes] = frozenset()
        self._issuers: frozenset[bytes] = frozenset()
        """SHA-256 of the public keys of the revoked issuing authorities."""
        self.number = 0
        """The number of the list."""
        self.signed = SignedRevokedKeys()
        self.sha256 = b""
        """SHA-256 of `signed`; empty without a list."""
        self.num_changes = 0
        """How often this object has changed."""

    def learn(self, signed: SignedRevokedKeys, ca: bytes) -> None:
        """Takes the revoked issuing authorities of a list, and its keys if it is newer than the present one.

        Args:
            ca: Certificate of the root, in PEM.

        Raises:
            NotPermittedError: The list is not signed by the authority, or by a revoked issuing authority. Then no key is taken.
        """
        root = read_certificate(ca)
        with self._lock:
            issuers = self._issuers | read_revoked_issuers(signed, root)
            if issuers != self._issuers:
                self._issuers = issuers
                self.num_changes += 1
            if self.number and _key_of_signer(self.signed) in issuers:
                # Its signer may be a thief, who has chosen a number that nothing exceeds.
                self.number = 0
            keys = read_signed(signed, root)
            try:
                check_issuer(read_certificate(signed.issuer), root, utc_now())
            except NotPermittedError as error:
                raise _unsigned(str(error)) from None
            if _key_of_signer(signed) in issuers:
                raise _unsigned("the issuing authority that signed it was revoked")
            if signed != self.signed and (
                keys.number > self.number or signed.keys == self.signed.keys
            ):
                self._digests = frozenset(key.sha256 for key in keys.keys)
                self.signed = signed
                self.sha256 = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
                self.number = keys.number
                self.num_changes += 1

    def check(self, chain: bytes) -> None:
        """Refuses the chain that a caller has shown, in PEM, if one of its keys is revoked; raises `NotPermittedError`.

        Whoever calls this has checked before that the chain ends at the root. It must have two certificates. With more, a thief could
        put another authority below a revoked one. TLS allows that in spite of the path length if both have the same name.
        """
        key, issuer = _key_digests(chain)
        if key in self._digests:
            raise NotPermittedError(
                "the key of this certificate was revoked with `collapipe certs revoke`: if this host may take part again, make a "
                "new key with `collapipe certs issue`, or with a new token and `collapipe join --again`"
            )
        if issuer in self._issuers:
            raise NotPermittedError(
                "the issuing authority of this certificate was revoked with `collapipe certs issuing --revoke`: make a new "
                "certificate with `collapipe certs issue`, or with a new token and `collapipe join --again`"
            )


def sign_list(
    keys: RevokedKeys, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate
) -> SignedRevokedKeys:
    """Signs a list as an issuing authority. No issuing authority is revoked in it."""
    data = keys.SerializeToString()
    signature = key.sign(_KEYS + data, _ALGORITHM)
    return SignedRevokedKeys(keys=data, signature=signature, issuer=der(issuer))


def sign_issuers(issuers: Iterable[bytes], key: ec.EllipticCurvePrivateKey) -> SignedRevokedKeys:
    """Signs the SHA-256 of the public keys of revoked issuing authorities as the root. It can be merged with a result of `sign_list`."""
    data = RevokedIssuers(sha256=issuers).SerializeToString()
    return SignedRevokedKeys(
        revoked_issuers=data, root_signature=key.sign(_ISSUERS + data, _ALGORITHM)
    )


def read_revoked_issuers(signed: SignedRevokedKeys, root: x509.Certificate) -> frozenset[bytes]:
    """Returns the SHA-256 of the public keys of the revoked issuing authorities of a list.

    Raises:
        NotPermittedError: The root has not signed them.
    """
    if not signed.revoked_issuers and not signed.root_signature:
        return frozenset()
    try:
        public_key_of(root).verify(
            signed.root_signature, _ISSUERS + signed.revoked_issuers, _ALGORITHM
        )
        return frozenset(RevokedIssuers.FromString(signed.revoked_issuers).sha256)
    except (InvalidSignature, DecodeError):
        raise _unsigned(
            "the root of this deployment has not signed its issuing authorities"
        ) from None


def read_signed(signed: SignedRevokedKeys, root: x509.Certificate) -> RevokedKeys:
    """Returns the keys of a list. The issuing authority that signed it may have expired, or may be revoked.

    Raises:
        NotPermittedError: No issuing authority of the root has signed the list.
    """
    try:
        issuer = read_certificate(signed.issuer)
        check_issuer(issuer, root, issuer.not_valid_before_utc)
        public_key_of(issuer).verify(signed.signature, _KEYS + signed.keys, _ALGORITHM)
        return RevokedKeys.FromString(signed.keys)
    except (InvalidInputError, NotPermittedError) as error:
        raise _unsigned(str(error)) from None
    except (InvalidSignature, DecodeError):
        raise _unsigned("its signature is wrong") from None


def parse_list(data: bytes) -> SignedRevokedKeys:
    """Reads the bytes of a file. Raises `InvalidInputError` if they are no list."""
    try:
        signed = SignedRevokedKeys.FromString(data)
    except DecodeError:
        signed = SignedRevokedKeys()
    if not signed.signature:
        raise InvalidInputError("not a signed list of revoked keys")
    return signed


@lru_cache(4096)  # A chain arrives with each call.
def _key_digests(chain: bytes) -> tuple[bytes, bytes]:
    """Returns the SHA-256 of the public keys of a holder and of its issuing authority."""
    try:
        read = read_chain(chain)
        return key_sha256(read.certificate), key_sha256(read.issuer)
    except (InvalidInputError, *UNREADABLE) as error:
        raise NotPermittedError(
            f"the certificate of the caller is malformed: {error}: make a new one with `collapipe certs issue`"
        ) from None


def _key_of_signer(signed: SignedRevokedKeys) -> bytes:
    return key_sha256(read_certificate(signed.issuer))


def _unsigned(reason: str) -> NotPermittedError:
    return NotPermittedError(
        f"the list of revoked keys is not signed by the authority of this deployment ({reason}): take the file that `collapipe certs "
        "revoke` has written"
    )
