"""Serialises tensors in the safetensors format, piece by piece.

The library `safetensors` serialises into one `bytes` object, which would double the memory that a device
needs during a transfer. The format is a length, a JSON header and the bytes of the tensors, so this module
writes it from the memory of the tensors. The library reads it.
"""

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from collapipe.documents import decode_json
from collapipe.errors import CorruptDataError, InvalidInputError

_TYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}

_PIECE_BYTES = 1 << 20

_MAX_HEADER_BYTES = 64 << 20


class TensorBlob:
    """Named tensors as a blob in the safetensors format.

    The blob refers to the tensors, so they must not change while the blob is in use. Only one piece at a
    time is copied from an accelerator. Each byte is hashed once: by the first `read`, or by `digest`.

    Args:
        digest: SHA-256 of the blob, if it is known already.
        reader: Called here, by the thread that made the tensors. What it returns copies a tensor to the host.

    Raises:
        InvalidInputError: A tensor has an element type that cannot be stored.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        digest: str = "",
        reader: Callable[[], Callable[[Tensor], Tensor]] = lambda: Tensor.cpu,
    ) -> None:
        self._reader, self._to_host = reader, reader()
        self._tensors = [(name, tensors[name].detach()) for name in sorted(tensors)]
        header, position = {}, 0
        for name, tensor in self._tensors:
            if tensor.dtype not in _TYPE_NAMES:
                raise InvalidInputError(
                    f"tensor {name!r} has type {tensor.dtype}, which cannot be stored: "
                    f"convert it to one of {', '.join(str(dtype) for dtype in _TYPE_NAMES)}"
                )
            header[name] = {
                "dtype": _TYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + tensor.nbytes],
            }
            position += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        self._prefix = len(text).to_bytes(8, "little") + text
        self.total_bytes = len(self._prefix) + position
        self._digest = digest
        self._checksum = hashlib.sha256()
        self._hashed_bytes = 0
        self._hashing = threading.Lock()

    @property
    def digest(self) -> str:
        """SHA-256 of the blob, in hexadecimal."""
        if not self._digest:
            for _ in self.read(self._hashed_bytes):
                pass
            self._digest = self._checksum.hexdigest()
        return self._digest

    def read(self, offset: int = 0) -> Iterator[memoryview]:
        """Yields the bytes from an offset on, in pieces of at most 1 MiB.

        Before the digest is known, the offset must not be beyond the bytes that were read so far.
        """
        start = 0
        for part in self._parts():
            for first in range(max(offset - start, 0), len(part), _PIECE_BYTES):
                piece = self._to_host(part[first : first + _PIECE_BYTES]).numpy().data
                if not self._digest:
                    self._hash(piece, start + first + len(piece))
                yield piece
            start += len(part)

    def _hash(self, piece: memoryview, end: int) -> None:
        """Hashes what is new in a piece that ends at the byte `end` of the blob."""
        with self._hashing:  # A transfer that broke off may still read while the next one begins.
            new = end - self._hashed_bytes
            if new > 0:
                self._checksum.update(piece[-new:])
                self._hashed_bytes = end

    def copy(self) -> "TensorBlob":
        """Returns the same blob with tensors of its own."""
        tensors = {name: tensor.clone() for name, tensor in self._tensors}
        return TensorBlob(tensors, self.digest, self._reader)

    def _parts(self) -> Iterator[Tensor]:
        """Yields the bytes of the header and of each tensor, where the tensor lies."""
        yield torch.frombuffer(bytearray(self._prefix), dtype=torch.uint8)
        for _, tensor in self._tensors:
            whole = tensor if tensor.is_contiguous() else self._to_host(tensor).contiguous()
            yield whole.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class BlobLayout:
    """The header of a blob: which tensors lie where. Two blobs with equal layouts have equal headers."""

    prefix: bytes
    """The first bytes of the blob, up to the first tensor."""
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """Name, element type, shape and size in bytes of each tensor, in the order of their bytes."""


def read_layout(file: BinaryIO) -> BlobLayout:
    """Reads the header of a blob from a file, up to its first tensor; raises `CorruptDataError`."""
    length = file.read(8)
    num_bytes = int.from_bytes(length, "little")
    try:
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"the header has {num_bytes} bytes, over {_MAX_HEADER_BYTES}")
        text = file.read(num_bytes)
        entries = sorted(decode_json(text).items(), key=lambda entry: entry[1]["data_offsets"])
        tensors, position = [], 0
        for name, entry in entries:
            begin, end = entry["data_offsets"]
            dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
            if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} has other bytes than its shape needs")
            position = end
            tensors.append((name, dtype, shape, end - begin))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"a blob has no header of safetensors: {error}") from error
    return BlobLayout(length + text, tuple(tensors))


def load_tensors(data: bytes) -> dict[str, Tensor]:
    """Reads tensors from bytes in the safetensors format; raises `CorruptDataError`."""
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptDataError(f"{len(data)} bytes are not safetensors: {error}") from error
