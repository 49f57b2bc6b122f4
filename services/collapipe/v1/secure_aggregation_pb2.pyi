from collapipe.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskingKeys(_message.Message):
    __slots__ = ("attempt", "cluster_index", "mask_key", "share_key")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEY_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    cluster_index: int
    mask_key: bytes
    share_key: bytes
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., cluster_index: _Optional[int] = ..., mask_key: _Optional[bytes] = ..., share_key: _Optional[bytes] = ...) -> None: ...

class SignedMaskingKeys(_message.Message):
    __slots__ = ("keys", "signature", "certificate")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    signature: bytes
    certificate: bytes
    def __init__(self, keys: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class EncryptedShares(_message.Message):
    __slots__ = ("sender", "receiver", "ciphertext")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    sender: int
    receiver: int
    ciphertext: bytes
    def __init__(self, sender: _Optional[int] = ..., receiver: _Optional[int] = ..., ciphertext: _Optional[bytes] = ...) -> None: ...

class MaskedRound(_message.Message):
    __slots__ = ("shares", "total_samples")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[EncryptedShares]
    total_samples: int
    def __init__(self, shares: _Optional[_Iterable[_Union[EncryptedShares, _Mapping]]] = ..., total_samples: _Optional[int] = ...) -> None: ...

class UnitMasks(_message.Message):
    __slots__ = ("unit_index", "added", "subtracted")
    UNIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    SUBTRACTED_FIELD_NUMBER: _ClassVar[int]
    unit_index: int
    added: _containers.RepeatedScalarFieldContainer[bytes]
    subtracted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, unit_index: _Optional[int] = ..., added: _Optional[_Iterable[bytes]] = ..., subtracted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RevealedShare(_message.Message):
    __slots__ = ("cluster_index", "share")
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    cluster_index: int
    share: bytes
    def __init__(self, cluster_index: _Optional[int] = ..., share: _Optional[bytes] = ...) -> None: ...

class RevealedShares(_message.Message):
    __slots__ = ("holder", "shares")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    holder: int
    shares: _containers.RepeatedCompositeFieldContainer[RevealedShare]
    def __init__(self, holder: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[RevealedShare, _Mapping]]] = ...) -> None: ...

class Unmasking(_message.Message):
    __slots__ = ("keys", "revealed", "total_samples")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REVEALED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[SignedMaskingKeys]
    revealed: _containers.RepeatedCompositeFieldContainer[RevealedShares]
    total_samples: int
    def __init__(self, keys: _Optional[_Iterable[_Union[SignedMaskingKeys, _Mapping]]] = ..., revealed: _Optional[_Iterable[_Union[RevealedShares, _Mapping]]] = ..., total_samples: _Optional[int] = ...) -> None: ...
