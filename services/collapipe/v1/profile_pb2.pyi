from collapipe.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileBlockRequest(_message.Message):
    __slots__ = ("model", "micro_batch_sizes", "sequence_length")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    model: _plan_pb2.ModelSpec
    micro_batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    sequence_length: int
    def __init__(self, model: _Optional[_Union[_plan_pb2.ModelSpec, _Mapping]] = ..., micro_batch_sizes: _Optional[_Iterable[int]] = ..., sequence_length: _Optional[int] = ...) -> None: ...

class ProfileBlockResponse(_message.Message):
    __slots__ = ("seconds_per_sample", "state_bytes", "stash_bytes_per_sample", "seconds_per_micro_batch", "num_parameters", "work_shares", "stash_shares")
    SECONDS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STASH_BYTES_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WORK_SHARES_FIELD_NUMBER: _ClassVar[int]
    STASH_SHARES_FIELD_NUMBER: _ClassVar[int]
    seconds_per_sample: float
    state_bytes: int
    stash_bytes_per_sample: int
    seconds_per_micro_batch: float
    num_parameters: int
    work_shares: _containers.RepeatedScalarFieldContainer[float]
    stash_shares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seconds_per_sample: _Optional[float] = ..., state_bytes: _Optional[int] = ..., stash_bytes_per_sample: _Optional[int] = ..., seconds_per_micro_batch: _Optional[float] = ..., num_parameters: _Optional[int] = ..., work_shares: _Optional[_Iterable[float]] = ..., stash_shares: _Optional[_Iterable[float]] = ...) -> None: ...
