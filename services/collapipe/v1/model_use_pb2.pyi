from collapipe.v1 import generation_pb2 as _generation_pb2
from collapipe.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelUse(_message.Message):
    __slots__ = ("prediction", "evaluation")
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    prediction: Prediction
    evaluation: FileEvaluation
    def __init__(self, prediction: _Optional[_Union[Prediction, _Mapping]] = ..., evaluation: _Optional[_Union[FileEvaluation, _Mapping]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("texts", "options", "numbers", "skips_refused")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    SKIPS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    options: _generation_pb2.GenerationOptions
    numbers: _containers.RepeatedScalarFieldContainer[int]
    skips_refused: bool
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[_generation_pb2.GenerationOptions, _Mapping]] = ..., numbers: _Optional[_Iterable[int]] = ..., skips_refused: bool = ...) -> None: ...

class FileEvaluation(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[EvaluatedFile]
    def __init__(self, files: _Optional[_Iterable[_Union[EvaluatedFile, _Mapping]]] = ...) -> None: ...

class EvaluatedFile(_message.Message):
    __slots__ = ("name", "total_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_bytes: int
    def __init__(self, name: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ModelOutput(_message.Message):
    __slots__ = ("waiting_for", "piece", "evaluation")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    piece: AnswerPiece
    evaluation: _job_pb2.Evaluation
    def __init__(self, waiting_for: _Optional[str] = ..., piece: _Optional[_Union[AnswerPiece, _Mapping]] = ..., evaluation: _Optional[_Union[_job_pb2.Evaluation, _Mapping]] = ...) -> None: ...

class AnswerPiece(_message.Message):
    __slots__ = ("text_index", "text", "tokens", "is_last", "refusal")
    TEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    text_index: int
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    refusal: str
    def __init__(self, text_index: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., is_last: bool = ..., refusal: _Optional[str] = ...) -> None: ...
