from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinToken(_message.Message):
    __slots__ = ("secret", "authority_certificate", "authority_address", "scheduler_address", "identity", "protocol")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    authority_certificate: bytes
    authority_address: str
    scheduler_address: str
    identity: str
    protocol: ProtocolVersions
    def __init__(self, secret: _Optional[bytes] = ..., authority_certificate: _Optional[bytes] = ..., authority_address: _Optional[str] = ..., scheduler_address: _Optional[str] = ..., identity: _Optional[str] = ..., protocol: _Optional[_Union[ProtocolVersions, _Mapping]] = ...) -> None: ...

class ProtocolVersions(_message.Message):
    __slots__ = ("oldest", "newest")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ("secret", "certificate_request")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    certificate_request: bytes
    def __init__(self, secret: _Optional[bytes] = ..., certificate_request: _Optional[bytes] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("certificate", "observed_host")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_HOST_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    observed_host: str
    def __init__(self, certificate: _Optional[bytes] = ..., observed_host: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("certificate", "certificate_request")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    certificate_request: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., certificate_request: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class RevokedKey(_message.Message):
    __slots__ = ("sha256", "identity")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    identity: str
    def __init__(self, sha256: _Optional[bytes] = ..., identity: _Optional[str] = ...) -> None: ...

class RevokedKeys(_message.Message):
    __slots__ = ("number", "keys")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    number: int
    keys: _containers.RepeatedCompositeFieldContainer[RevokedKey]
    def __init__(self, number: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[RevokedKey, _Mapping]]] = ...) -> None: ...

class RevokedIssuers(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sha256: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SignedRevokedKeys(_message.Message):
    __slots__ = ("keys", "signature", "issuer", "revoked_issuers", "root_signature")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    REVOKED_ISSUERS_FIELD_NUMBER: _ClassVar[int]
    ROOT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    signature: bytes
    issuer: bytes
    revoked_issuers: bytes
    root_signature: bytes
    def __init__(self, keys: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., issuer: _Optional[bytes] = ..., revoked_issuers: _Optional[bytes] = ..., root_signature: _Optional[bytes] = ...) -> None: ...
