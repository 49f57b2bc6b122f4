"""Keeps large tensors in files, so that a process can make, cut and export a model that is larger than its memory."""

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collapipe.documents import name_full_disk

_LARGE_BYTES = 1 << 20
_RESIDENT_BYTES = 256 << 20
"""Operations may touch this many bytes before all pages are removed from memory."""
_FILE_BYTES = 1 << 30
"""Size of a file, unless a tensor needs a larger one. Its blocks are allocated when they are needed."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
}
"""Operations that make a tensor of zeros, or one whose values do not matter."""
_COPIES = {_aten.clone.default, _aten._to_copy.default}


class TensorsOnDisk(TorchDispatchMode):
    """A context in which the large tensors that this thread makes lie in files without names. Their values do not change.

    After the context has ended, a file exists until its last tensor is deleted.

    Args:
        directory: Where the files are. It must exist, on a disk and not in memory.
        check: Called before each operation. Its error ends the context, so that work that nobody wants any more ends soon.
    """

    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check
        self._directory = directory
        self._files: list[mmap.mmap] = []
        self._descriptor = -1
        self._used_bytes = self._size = 0
        self._touched_bytes = 0

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self.release()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._files, self._descriptor, self._used_bytes, self._size = [], -1, 0, 0

    def release(self) -> None:
        """Removes the pages of the files from memory. The system reads them again when they are needed."""
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)  # Pages of a shared file lose no changes.
        self._touched_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._check()
        kwargs = kwargs or {}
        if not (func in _EMPTY or func in _COPIES) or _device(args, kwargs).type != "cpu":
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.device.type == "cpu":
                self._touch(result.nbytes)
            return result
        if func in _EMPTY:
            wanted = func(*args, **{**kwargs, "device": torch.device("meta")})
        else:
            wanted = torch.empty_like(
                args[0],
                dtype=kwargs.get("dtype"),
                device="meta",
                memory_format=kwargs.get("memory_format") or torch.preserve_format,
            )
        num_bytes = wanted.untyped_storage().nbytes()
        if num_bytes < _LARGE_BYTES:
            return func(*args, **kwargs)
        tensor = self._allocate(num_bytes, wanted)
        return tensor.copy_(args[0]) if func in _COPIES else tensor

    def _allocate(self, num_bytes: int, wanted: Tensor) -> Tensor:
        """Returns a tensor of zeros with the shape, the strides and the type of `wanted`."""
        self._touch(num_bytes)
        with name_full_disk(self._directory):
            if self._used_bytes + num_bytes > self._size:
                self._open_file(max(num_bytes, _FILE_BYTES))
            # Without its blocks, a full disk would end the process when the tensor is written.
            os.posix_fallocate(self._descriptor, self._used_bytes, num_bytes)
        flat = torch.frombuffer(
            self._files[-1],
            dtype=wanted.dtype,
            count=num_bytes // wanted.dtype.itemsize,
            offset=self._used_bytes,
        )
        self._used_bytes += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return torch.as_strided(flat, wanted.shape, wanted.stride())

    def _touch(self, num_bytes: int) -> None:
        self._touched_bytes += num_bytes
        if self._touched_bytes > _RESIDENT_BYTES:
            self.release()

    def _open_file(self, size: int) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        with tempfile.TemporaryFile(dir=self._directory) as file:
            self._descriptor = os.dup(file.fileno())
        os.ftruncate(self._descriptor, size)
        self._files.append(mmap.mmap(self._descriptor, size))
        self._used_bytes, self._size = 0, size


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Returns the device on which an operation would make its tensor."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    return args[0].device if args and isinstance(args[0], Tensor) else torch.device("cpu")
