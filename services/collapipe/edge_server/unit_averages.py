"""Averages one unit of all clusters, from files to a file, one slice of a tensor after the other. So the memory is bounded."""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from collapipe.aggregation import (
    bounded_weights,
    clipped_average,
    clipping_scales,
    federated_average,
    trimmed_mean,
)
from collapipe.documents import name_full_disk
from collapipe.edge_server.push_stream import Push
from collapipe.errors import CollapipeError, CorruptDataError
from collapipe.job import AveragingConfig
from collapipe.secure_aggregation.fixed_point import from_ring
from collapipe.secure_aggregation.masks import MaskKeys, MaskStream
from collapipe.weights.blob_store import check_digest, check_file
from collapipe.weights.delta_codecs import decode_delta
from collapipe.weights.tensor_blob import BlobLayout, TensorBlob, load_tensors, read_layout

_SLICE_BYTES = 1 << 20
"""Bytes of a cluster's tensor that are in memory while clusters are averaged."""
_ALIGNED_BYTES = 64
"""A multiple of the size of every element."""


@dataclass(frozen=True)
class Averaged:
    """The average of one unit, in a file that is synced to the disk.

    Args:
        cluster_digests: Digests of the weights of each cluster, in cluster order.
        changes: Euclidean norms of what each cluster has changed, in cluster order. Empty if the changes were masked.
    """

    path: Path
    digest: str
    cluster_digests: tuple[str, ...]
    changes: tuple[float, ...]


def average_unit(
    pushes: Sequence[Push], target: Path, before: Path, averaging: AveragingConfig
) -> Averaged:
    """Averages one unit into a file, one slice of a tensor after the other.

    Args:
        before: The global weights of the unit with which the round began, in a file that is named by their digest.
    """
    try:
        return _average(pushes, target, before, averaging)
    except CollapipeError:
        check_file(before)  # Otherwise a cluster would be blamed for its damage.
        raise


def _average(
    pushes: Sequence[Push], target: Path, before: Path, averaging: AveragingConfig
) -> Averaged:
    weights = []
    for push in pushes:
        with _blaming(push):
            weights.append(_weights(push))
    digests = tuple(digest for _, digest in weights)
    paths = [path for path, _ in weights]
    if len(set(digests)) == 1:  # Equal states are their own average.
        changes = len(pushes) * _changes(pushes[:1], paths[:1], before)
        return Averaged(*weights[0], digests, changes)
    shares = bounded_weights([push.num_samples for push in pushes], averaging.max_share)
    rule, slice_bytes, scales = averaging.rule, _SLICE_BYTES, list[float]()
    num_trimmed = averaging.trimmed_clusters if rule == "trimmed_mean" else None
    if rule == "clipped_mean":
        scales = clipping_scales(_changes(pushes, paths, before))
    elif rule != "mean":  # The slices of all clusters are in memory together.
        slice_bytes = max(_SLICE_BYTES // len(pushes) // _ALIGNED_BYTES, 1) * _ALIGNED_BYTES
    checksum = hashlib.sha256()
    with _reading(pushes, paths, before) as reading, name_full_disk(target):
        with open(target, "wb") as output:
            checksum.update(reading.layout.prefix)
            output.write(reading.layout.prefix)
            for base_slice, slices in reading.slices(slice_bytes):
                if rule == "clipped_mean":
                    averaged = clipped_average(base_slice, slices, shares, scales)
                elif rule == "mean":
                    averaged = federated_average(slices, shares)
                else:
                    averaged = trimmed_mean(list(slices), num_trimmed)
                data = _bytes_of(averaged)
                checksum.update(data)
                output.write(data)
        return Averaged(target, checksum.hexdigest(), digests, reading.changes)


def average_masked_unit(
    pushes: Sequence[Push], target: Path, before: Path, masks: MaskKeys, total_samples: int
) -> Averaged:
    """Adds the masked changes of one unit, removes the masks that are left, and writes the average to a file.

    Args:
        before: As in `average_unit`.
        masks: What is left in the sum.
        total_samples: As in `to_ring`.

    Raises:
        CorruptDataError: A change has other tensors than the unit or refers to other weights, or a mask is left.
    """
    check_file(before)
    num_samples = sum(push.num_samples for push in pushes)
    checksum, stream = hashlib.sha256(), MaskStream(masks)
    with ExitStack() as stack, name_full_disk(target):
        base = stack.enter_context(open(before, "rb"))
        layout = read_layout(base)
        expected = tuple(
            (name, torch.int32, shape, 4 * math.prod(shape))
            for name, dtype, shape, _ in layout.tensors
            if dtype.is_floating_point
        )
        files = [stack.enter_context(open(push.path, "rb")) for push in pushes]
        for push, file in zip(pushes, files, strict=True):
            if read_layout(file).tensors != expected or push.base_path != before:
                raise CorruptDataError(
                    f"{push.path.name} was pushed with a masked change of other tensors, or of other weights than those with which "
                    "the round began: run the same version everywhere"
                )
        output = stack.enter_context(open(target, "wb"))
        checksum.update(layout.prefix)
        output.write(layout.prefix)
        for name, dtype, _, num_bytes in layout.tensors:
            for start in range(0, num_bytes, _SLICE_BYTES):
                averaged = _read_slice(base, dtype, min(_SLICE_BYTES, num_bytes - start))
                if dtype.is_floating_point:
                    total = torch.zeros(len(averaged), dtype=torch.int32)
                    values = total.numpy().view("<u4")  # the memory of `total`
                    for file in files:
                        part = _read_slice(file, torch.int32, 4 * len(averaged))
                        values += part.numpy().view("<u4")
                    values -= stream.take(len(averaged))
                    averaged = from_ring(averaged, total, num_samples, total_samples, name)
                data = _bytes_of(averaged)
                checksum.update(data)
                output.write(data)
    digests = tuple(push.digest for push in pushes)
    return Averaged(target, checksum.hexdigest(), digests, ())


class _Reading:
    """Reads the weights of clusters beside those of before, and measures what each cluster has changed meanwhile.

    Args:
        files: The weights of each push.
        base: The weights of before.
    """

    def __init__(
        self,
        pushes: Sequence[Push],
        files: Sequence[BinaryIO],
        base: BinaryIO,
    ) -> None:
        self._pushes, self._files, self._base = pushes, files, base
        self._squares = [0.0] * len(pushes)
        self.layout = read_layout(base)
        for push, file in zip(pushes, files, strict=True):
            with _blaming(push):
                _check_layout(file, self.layout, base)

    def slices(self, num_bytes: int) -> Iterator[tuple[torch.Tensor, Iterator[torch.Tensor]]]:
        """Yields a slice of before, and those of all clusters, which must be taken before the next one.

        Raises:
            CorruptDataError: A value of a cluster is not finite, or the weights of before are damaged.
        """
        checksum = hashlib.sha256(self.layout.prefix)
        for _, dtype, _, total_bytes in self.layout.tensors:
            for start in range(0, total_bytes, num_bytes):
                base = _read_slice(self._base, dtype, min(num_bytes, total_bytes - start))
                checksum.update(_bytes_of(base))
                yield base, self._measured(base)
        check_digest(Path(self._base.name), checksum)

    def _measured(self, base: torch.Tensor) -> Iterator[torch.Tensor]:
        before = base.double()
        for index, (push, file) in enumerate(zip(self._pushes, self._files, strict=True)):
            with _blaming(push):
                values = _read_slice(file, base.dtype, base.nbytes)
                if base.is_floating_point():
                    self._squares[index] += _square_of_change(values, before, file)
            yield values

    @property
    def changes(self) -> tuple[float, ...]:
        """The Euclidean norms of what the clusters have changed in the slices so far. Integer tensors do not count."""
        return tuple(math.sqrt(square) for square in self._squares)


@contextmanager
def _reading(pushes: Sequence[Push], paths: Sequence[Path], before: Path) -> Iterator[_Reading]:
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in paths]
        yield _Reading(pushes, files, stack.enter_context(open(before, "rb")))


def _changes(pushes: Sequence[Push], paths: Sequence[Path], before: Path) -> tuple[float, ...]:
    """Returns the Euclidean norms of what clusters have changed, without an average."""
    with _reading(pushes, paths, before) as reading:
        for _, slices in reading.slices(_SLICE_BYTES):
            for _ in slices:
                pass
        return reading.changes


@contextmanager
def _blaming(push: Push) -> Iterator[None]:
    """Adds the cluster of a push to an error within the block."""
    try:
        yield
    except CollapipeError as error:
        error.cluster_index = push.cluster_index
        raise


def _check_layout(file: BinaryIO, expected: BlobLayout, base: BinaryIO) -> None:
    """Refuses weights whose tensors have other names, types or shapes than before; raises `CorruptDataError`."""
    sizes = [os.fstat(each.fileno()).st_size for each in (file, base)]
    if read_layout(file) != expected or sizes[0] != sizes[1]:
        raise CorruptDataError(
            f"{Path(file.name).name} was pushed with tensors of other names, types or shapes than before: run the same version "
            "everywhere"
        )


def _square_of_change(values: torch.Tensor, before: torch.Tensor, file: BinaryIO) -> float:
    """Returns the sum of the squares of what a cluster has changed; raises `CorruptDataError` if a value is not finite."""
    square = float(values.double().sub_(before).square_().sum())
    # With a value that is not finite, neither is the sum. So most slices need no further look.
    if not math.isfinite(square) and not torch.isfinite(values).all():
        raise CorruptDataError(
            f"{Path(file.name).name} was pushed with weights that are infinite or not a number: a device computes wrongly, or "
            "training diverged; lower training.learning_rate, or leave the device out"
        )
    return square


def _weights(push: Push) -> tuple[Path, str]:
    """Returns the file and the digest of a cluster's weights. Decodes them first if a delta was pushed."""
    if push.base_path is None:
        return push.path, push.digest
    delta = load_tensors(push.path.read_bytes())
    blob = TensorBlob(decode_delta(delta, load_file(push.base_path)))
    path = push.path.with_name(f"{push.path.name}-decoded")
    with name_full_disk(path), open(path, "wb") as file:
        file.writelines(blob.read())
    return path, blob.digest


def _read_slice(file: BinaryIO, dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    values = torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
    if file.readinto(_bytes_of(values)) != num_bytes:  # type: ignore[attr-defined]
        raise CorruptDataError(f"{file.name} ends before its last tensor: run the round again")
    return values


def _bytes_of(values: torch.Tensor) -> Any:
    """Returns the memory of a tensor."""
    return values.view(torch.uint8).numpy().data
