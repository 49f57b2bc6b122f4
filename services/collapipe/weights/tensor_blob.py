"""Serialises tensors in the safetensors format, piece by piece.

The library `safetensors` serialises into one `bytes` object, which would double the memory that a device
needs during a transfer. The format is a length, a JSON header and the bytes of the tensors, so this module
writes it from the memory of the tensors. The library reads it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from collapipe.errors import CorruptDataError, InvalidInputError

_TYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


class TensorBlob:
    """Named tensors as a blob in the safetensors format.

    The blob refers to the tensors, so they must not change while the blob is in use. Only one tensor at a
    time is copied from an accelerator.

    Raises:
        InvalidInputError: A tensor has an element type that cannot be stored.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
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

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the blob, in hexadecimal."""
        checksum = hashlib.sha256()
        for piece in self._pieces():
            checksum.update(piece)
        return checksum.hexdigest()

    def read(self, offset: int = 0) -> Iterator[memoryview]:
        """Yields the bytes from an offset on, in one piece for each tensor."""
        for piece in self._pieces():
            if offset < len(piece):
                yield piece[offset:]
            offset = max(offset - len(piece), 0)

    def _pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._prefix)
        for _, tensor in self._tensors:
            if tensor.nbytes:
                flat = tensor.cpu().contiguous().reshape(-1)
                yield flat.view(torch.uint8).numpy().data


def load_tensors(data: bytes) -> dict[str, Tensor]:
    """Reads tensors from bytes in the safetensors format; raises `CorruptDataError`."""
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptDataError(f"{len(data)} bytes are not safetensors: {error}") from error
