"""Encodes the tensors of one micro-batch as a frame, and decodes frames that arrive.

On the wire, a frame is a `FrameHeader`, followed by the bytes of its tensors in chunks of at most
`CHUNK_BYTES`. A chunk contains bytes of one tensor only. The header announces all sizes, so that a receiver
can refuse a frame before it allocates memory.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor

from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.tensors.encoding import LOSSY_CODECS
from collapipe.v1 import stage_pb2, tensor_pb2

CHUNK_BYTES = 1 << 20
"""Most bytes in one message. Larger messages serialise more slowly, and smaller ones cost more calls."""

MAX_FRAME_BYTES = 1 << 30
"""The most memory, in bytes, that decoding any frame may take."""

_MAX_HEADER_BYTES = 4096
"""Largest header. Four tensors need a tenth of it."""

_MOST_NUMBER = (1 << 31) - 1
"""Largest number of a step, a micro-batch or a slice. Spans have 32 bits for each, with a sign."""

ACTIVATION = "activation"
"""Name of the activation or its gradient in a frame. Codecs encode only this tensor."""

LABELS = "labels"
"""Name of the labels in a frame."""

_TORCH_TYPES: dict[int, torch.dtype] = {
    number: getattr(torch, name.removeprefix("DATA_TYPE_").lower())
    for name, number in tensor_pb2.DataType.items()
    if number != tensor_pb2.DATA_TYPE_UNSPECIFIED
}
_DATA_TYPES: dict[torch.dtype, Any] = {dtype: number for number, dtype in _TORCH_TYPES.items()}


class FrameKind(IntEnum):
    """The purpose of a frame."""

    FORWARD = stage_pb2.FRAME_KIND_FORWARD
    BACKWARD = stage_pb2.FRAME_KIND_BACKWARD
    EVALUATE = stage_pb2.FRAME_KIND_EVALUATE
    PREDICTION = stage_pb2.FRAME_KIND_PREDICTION
    GENERATE = stage_pb2.FRAME_KIND_GENERATE
    END_GENERATION = stage_pb2.FRAME_KIND_END_GENERATION
    LABELS = stage_pb2.FRAME_KIND_LABELS

    @property
    def towards_head(self) -> bool:
        """Whether frames of this kind go from a stage to the next one."""
        return self in TOWARDS_HEAD


MAX_BYTES_OF_KINDS = dict.fromkeys(FrameKind, MAX_FRAME_BYTES)
"""The limits of a receiver that knows no plan."""
TOWARDS_EMBEDDING = frozenset({FrameKind.BACKWARD, FrameKind.PREDICTION})
"""The kinds of frames that go from a stage to the previous one."""
TOWARDS_HEAD = frozenset(FrameKind) - TOWARDS_EMBEDDING - {FrameKind.LABELS}
"""The kinds of frames that go from a stage to the next one."""


@dataclass(frozen=True)
class Frame:
    """The tensors of one micro-batch, or of one slice of it, that one stage sends to a neighbour."""

    kind: FrameKind
    step_index: int
    micro_batch: int
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    slice_index: int = 0
    """0 in a micro-batch that is not cut into slices."""
    ready: Callable[[], None] | None = None
    """Waits until an accelerator has computed the tensors and copied them to the host. `None` if they are there."""

    def wait(self) -> None:
        """Waits until the tensors are there."""
        if self.ready is not None:
            self.ready()

    def with_tensors(
        self, tensors: dict[str, Tensor], ready: Callable[[], None] | None = None
    ) -> "Frame":
        """Returns a frame of the same kind and place with other tensors."""
        return replace(self, _tensors=tensors, ready=ready)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. Waits until they are there."""
        self.wait()
        return self._tensors

    @property
    def byte_length(self) -> int:
        """Bytes of all tensors before encoding."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def encode_frame(
    frame: Frame,
    codec: tensor_pb2.Codec = tensor_pb2.CODEC_FP32,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[stage_pb2.FrameHeader, Iterator[bytes]]:
    """Encodes a frame as its header and the chunks that follow it.

    Args:
        codec: The codec of the activation or its gradient. Other tensors and predictions stay lossless.

    Raises:
        InvalidInputError: A tensor has an element type that cannot be sent.
    """
    headers, views = [], []
    for name, tensor in frame.tensors.items():
        if tensor.dtype not in _DATA_TYPES:
            raise InvalidInputError(
                f"tensor {name!r} has type {tensor.dtype}, which cannot be sent: "
                f"convert it to one of {', '.join(str(dtype) for dtype in _DATA_TYPES)}"
            )
        wire = tensor.detach().contiguous()
        lossy = (
            codec != tensor_pb2.CODEC_FP32
            and name == ACTIVATION
            and tensor.dtype is torch.float32
            and frame.kind is not FrameKind.PREDICTION
        )
        view = _byte_view(LOSSY_CODECS[codec].encode(wire) if lossy else wire)
        headers.append(
            tensor_pb2.TensorHeader(
                name=name,
                data_type=_DATA_TYPES[tensor.dtype],
                shape=tensor.shape,
                codec=codec if lossy else tensor_pb2.CODEC_FP32,
                byte_length=len(view),
                crc32=zlib.crc32(view),
            )
        )
        views.append(view)
    header = stage_pb2.FrameHeader(
        kind=frame.kind.value,
        step_index=frame.step_index,
        micro_batch=frame.micro_batch,
        slice_index=frame.slice_index,
        tensors=headers,
    )
    chunks = (
        bytes(view[start : start + chunk_bytes])
        for view in views
        for start in range(0, len(view), chunk_bytes)
    )
    return header, chunks


class FrameAssembler:
    """Decodes the frames of one stream from their headers and chunks.

    Args:
        limits: For each kind of frames that the sender may send, the most memory in bytes that decoding a frame may take.
    """

    def __init__(self, limits: Mapping[FrameKind, int] = MAX_BYTES_OF_KINDS) -> None:
        self._limits = limits
        self._header: stage_pb2.FrameHeader | None = None
        self._buffers: list[Tensor] = []
        self._incomplete: deque[tuple[tensor_pb2.TensorHeader, memoryview]] = deque()
        """Tensors that lack bytes, with their memory."""
        self._filled_bytes = 0
        """Bytes of the first of them that have arrived."""

    def begin(self, header: stage_pb2.FrameHeader) -> Frame | None:
        """Takes a header. Returns the frame if no bytes follow.

        Raises:
            CorruptDataError: The previous frame is incomplete, the header contradicts itself, or the sender may not send frames of
                this kind.
            InvalidInputError: The frame or its header is larger than the limit.
        """
        if self._header is not None:
            raise CorruptDataError(
                f"a new frame began while micro-batch {self._header.micro_batch} of step "
                f"{self._header.step_index} lacked bytes: run the round again"
            )
        if int(header.kind) not in set(FrameKind):
            raise CorruptDataError(f"a frame of the unknown kind {header.kind} arrived")
        if (kind := FrameKind(header.kind)) not in self._limits:
            raise CorruptDataError(
                f"a frame of kind {kind.name} arrived, but its sender may only send {', '.join(k.name for k in self._limits)}: run the same version "
                "everywhere"
            )
        if header.ByteSize() > _MAX_HEADER_BYTES:
            raise InvalidInputError(
                f"the header of a frame has {header.ByteSize()} bytes, over the limit of {_MAX_HEADER_BYTES}: run the same version "
                "everywhere"
            )
        number = max(header.step_index, header.micro_batch, header.slice_index)
        if number > _MOST_NUMBER:
            raise CorruptDataError(
                f"a frame is of step {header.step_index}, micro-batch {header.micro_batch} and slice {header.slice_index}, but each is at "
                f"most {_MOST_NUMBER}: run the same version everywhere"
            )
        total, limit = sum(_check(tensor) for tensor in header.tensors), self._limits[kind]
        if total > limit:
            remedy = (
                "use more micro-batches or shorter sequences"
                if limit == MAX_FRAME_BYTES
                else "the plan and the model need no more, so run the same version everywhere"
            )
            raise InvalidInputError(
                f"a frame of kind {kind.name} with {total} bytes exceeds the limit of {limit}: {remedy}"
            )
        names = [tensor.name for tensor in header.tensors]
        if len(set(names)) < len(names):
            raise CorruptDataError(f"a frame names one of its tensors twice: {', '.join(names)}")
        self._header = header
        self._buffers = [_allocate(tensor) for tensor in header.tensors]
        self._incomplete.extend(
            (tensor, _byte_view(buffer))
            for tensor, buffer in zip(header.tensors, self._buffers, strict=True)
            if tensor.byte_length
        )
        return self._frame_if_complete()

    def add(self, chunk: bytes) -> Frame | None:
        """Takes the next chunk. Returns the frame after the last chunk.

        Raises:
            CorruptDataError: The chunk belongs to no frame, has too many bytes, or completes a tensor with a
                wrong checksum.
        """
        if not self._incomplete:
            raise CorruptDataError(f"a chunk of {len(chunk)} bytes arrived outside any frame")
        announced, view = self._incomplete[0]
        filled = self._filled_bytes + len(chunk)
        if not chunk or filled > announced.byte_length:
            raise CorruptDataError(
                f"tensor {announced.name!r} was announced with {announced.byte_length} bytes, "
                f"but a chunk of {len(chunk)} makes it {filled}"
            )
        view[self._filled_bytes : filled] = chunk
        self._filled_bytes = filled
        if filled == announced.byte_length:
            if zlib.crc32(view) != announced.crc32:
                raise CorruptDataError(
                    f"tensor {announced.name!r} arrived with CRC-32 {zlib.crc32(view):08x} instead of "
                    f"{announced.crc32:08x}: the link garbles data; run the round again"
                )
            self._incomplete.popleft()
            self._filled_bytes = 0
        return self._frame_if_complete()

    def _frame_if_complete(self) -> Frame | None:
        header = self._header
        if header is None or self._incomplete:
            return None
        tensors = {
            tensor.name: buffer
            if tensor.codec == tensor_pb2.CODEC_FP32
            else LOSSY_CODECS[tensor.codec].decode(buffer, tuple(tensor.shape))
            for tensor, buffer in zip(header.tensors, self._buffers, strict=True)
        }
        self._header, self._buffers = None, []
        return Frame(
            FrameKind(header.kind),
            header.step_index,
            header.micro_batch,
            tensors,
            header.slice_index,
        )


def _check(header: tensor_pb2.TensorHeader) -> int:
    """Refuses a header that contradicts itself. Returns the bytes that decoding it takes."""
    dtype = _TORCH_TYPES.get(header.data_type)
    is_raw = header.codec == tensor_pb2.CODEC_FP32
    if dtype is None or not (is_raw or (header.codec in LOSSY_CODECS and dtype is torch.float32)):
        raise CorruptDataError(
            f"tensor {header.name!r} has data type {header.data_type} and codec {header.codec}, "
            "which this version does not know: run the same version everywhere"
        )
    shape = tuple(header.shape)
    decoded = prod(shape) * dtype.itemsize
    if (
        min(shape, default=0) < 0
        or (decoded if is_raw else LOSSY_CODECS[header.codec].encoded_bytes(shape))
        != header.byte_length
        or prod(max(extent, 1) for extent in shape) >= 1 << 63  # torch's strides would overflow
    ):
        raise CorruptDataError(
            f"tensor {header.name!r} of shape {list(shape)} cannot have {header.byte_length} bytes"
        )
    return decoded if is_raw else LOSSY_CODECS[header.codec].decoding_bytes(shape)


def _allocate(header: tensor_pb2.TensorHeader) -> Tensor:
    """Allocates memory for the encoded bytes. Without a lossy codec, this is the tensor itself."""
    if header.codec == tensor_pb2.CODEC_FP32:
        return torch.empty(tuple(header.shape), dtype=_TORCH_TYPES[header.data_type])
    return torch.empty(header.byte_length, dtype=torch.uint8)


def _byte_view(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor, without a copy, as bytes (numpy has no bfloat16)."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
