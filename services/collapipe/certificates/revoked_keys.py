"""The list of revoked keys. Hosts refuse every caller whose certificate has one of these keys. The authority signs the list, and the
scheduler sends it to all hosts.

A list names keys and not certificates, because a renewal keeps the key.
"""

import threading
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from collapipe.certificates.pki import UNREADABLE, key_sha256, read_certificate
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import RevokedKeys, SignedRevokedKeys

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_CONTEXT = b"collapipe revoked keys\0"
"""Precedes the signed bytes, so that nothing else that the authority signs can be taken for a list."""


class RevokedKeyList:
    """Keeps the newest list that this process has received. It is empty at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: frozenset[bytes] = frozenset()
        self.number = 0
        """How many lists the authority has made, up to this one."""
        self.signed = SignedRevokedKeys()

    def learn(self, signed: SignedRevokedKeys, ca: bytes) -> None:
        """Takes a list if it is newer than the present one.

        Args:
            ca: Certificate of the authority, in PEM.

        Raises:
            NotPermittedError: The authority has not signed the list.
        """
        keys = read_signed(signed, ca)
        with self._lock:
            if keys.number > self.number:
                self._digests = frozenset(key.sha256 for key in keys.keys)
                self.signed = signed
                self.number = keys.number

    def check(self, certificate: bytes) -> None:
        """Refuses a certificate, in PEM or DER, if its key is revoked; raises `NotPermittedError`."""
        if self._digests and key_digest(certificate) in self._digests:
            raise NotPermittedError(
                "the key of this certificate was revoked with `collapipe certs revoke`: if this host may take part again, make a "
                "new key with `collapipe certs issue`, or with a new token and `collapipe join --again`"
            )


def sign_list(keys: RevokedKeys, key: ec.EllipticCurvePrivateKey) -> SignedRevokedKeys:
    """Signs a list with the key of the authority."""
    data = keys.SerializeToString()
    return SignedRevokedKeys(keys=data, signature=key.sign(_CONTEXT + data, _ALGORITHM))


def read_signed(signed: SignedRevokedKeys, ca: bytes) -> RevokedKeys:
    """Returns the keys of a list; raises `NotPermittedError` if the authority, whose certificate is `ca` in PEM, has not signed it."""
    key = read_certificate(ca).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(signed.signature, _CONTEXT + signed.keys, _ALGORITHM)
        return RevokedKeys.FromString(signed.keys)
    except (InvalidSignature, DecodeError):
        raise NotPermittedError(
            "the list of revoked keys is not signed by the authority of this deployment: take the file that `collapipe certs "
            "revoke` has written"
        ) from None


def parse_list(data: bytes) -> SignedRevokedKeys:
    """Reads the bytes of a file. Raises `InvalidInputError` if they are no list."""
    try:
        signed = SignedRevokedKeys.FromString(data)
    except DecodeError:
        signed = SignedRevokedKeys()
    if not signed.signature:
        raise InvalidInputError("not a signed list of revoked keys")
    return signed


@lru_cache(4096)  # A certificate arrives with each call.
def key_digest(certificate: bytes) -> bytes:
    """Returns the SHA-256 of the public key of a certificate in PEM or DER; raises `NotPermittedError` if it is malformed."""
    try:
        return key_sha256(read_certificate(certificate))
    except (InvalidInputError, *UNREADABLE) as error:
        raise NotPermittedError(
            f"the certificate of the caller is malformed: {error}: make a new one with `collapipe certs issue`"
        ) from None
