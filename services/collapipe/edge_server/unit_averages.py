"""Averages one unit of all clusters, from files to a file, one slice of a tensor after the other. So the memory is bounded."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
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
from collapipe.weights.blob_store import check_file
from collapipe.weights.delta_codecs import decode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors, read_layout

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
    check_file(before)  # Otherwise a cluster would be blamed for its damage.
    weights = []
    norms: dict[str, float] = {}
    for push in pushes:
        try:
            path, digest = _weights(push)
            if digest not in norms:
                norms[digest] = _norm_of_change(path, before)
        except CollapipeError as error:
            error.cluster_index = push.cluster_index
            raise
        weights.append((path, digest))
    digests = tuple(digest for _, digest in weights)
    changes = tuple(norms[digest] for digest in digests)
    if len(norms) == 1:  # Equal states are their own average.
        return Averaged(*weights[0], digests, changes)
    shares = bounded_weights([push.num_samples for push in pushes], averaging.max_share)
    num_trimmed = averaging.trimmed_clusters if averaging.rule == "trimmed_mean" else None
    scales, slice_bytes = clipping_scales(changes), _SLICE_BYTES
    if averaging.rule in (
        "trimmed_mean",
        "median",
    ):  # The slices of all clusters are in memory together.
        slice_bytes = max(_SLICE_BYTES // len(pushes) // _ALIGNED_BYTES, 1) * _ALIGNED_BYTES
    checksum = hashlib.sha256()
    with ExitStack() as stack, name_full_disk(target):
        files = [stack.enter_context(open(path, "rb")) for path, _ in weights]
        base = stack.enter_context(open(before, "rb"))
        *_, layout = [read_layout(file) for file in (*files, base)]  # They are equal.
        output = stack.enter_context(open(target, "wb"))
        checksum.update(layout.prefix)
        output.write(layout.prefix)
        for _, dtype, _, num_bytes in layout.tensors:
            for start in range(0, num_bytes, slice_bytes):
                count = min(slice_bytes, num_bytes - start)
                slices = (_read_slice(file, dtype, count) for file in files)
                if averaging.rule == "clipped_mean":
                    base_slice = _read_slice(base, dtype, count)
                    averaged = clipped_average(base_slice, slices, shares, scales)
                elif averaging.rule == "mean":
                    averaged = federated_average(slices, shares)
                else:
                    averaged = trimmed_mean(list(slices), num_trimmed)
                data: Any = averaged.view(torch.uint8).numpy().data
                checksum.update(data)
                output.write(data)
    return Averaged(target, checksum.hexdigest(), digests, changes)


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
                data: Any = averaged.view(torch.uint8).numpy().data
                checksum.update(data)
                output.write(data)
    digests = tuple(push.digest for push in pushes)
    return Averaged(target, checksum.hexdigest(), digests, ())


def _norm_of_change(path: Path, before: Path) -> float:
    """Returns the Euclidean norm of what a cluster has changed in a unit. Integer tensors do not count.

    Raises:
        CorruptDataError: The tensors have other names, types or shapes than before, or a value is not finite.
    """
    squares = 0.0
    with open(path, "rb") as new, open(before, "rb") as old:
        layout = read_layout(new)
        if layout != read_layout(old) or path.stat().st_size != before.stat().st_size:
            raise CorruptDataError(
                f"{path.name} was pushed with tensors of other names, types or shapes than before: run the same version "
                "everywhere"
            )
        for _, dtype, _, num_bytes in layout.tensors:
            for start in range(0, num_bytes, _SLICE_BYTES):
                count = min(_SLICE_BYTES, num_bytes - start)
                change = _read_slice(new, dtype, count).double()
                change -= _read_slice(old, dtype, count).double()
                if dtype.is_floating_point:
                    squares += float(change.square().sum())
    return math.sqrt(squares)


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
    data = bytearray(num_bytes)
    if file.readinto(data) != num_bytes:  # type: ignore[attr-defined]
        raise CorruptDataError(f"{file.name} ends before its last tensor: run the round again")
    values = torch.frombuffer(data, dtype=dtype)
    if not torch.isfinite(values).all():
        raise CorruptDataError(
            f"{Path(file.name).name} was pushed with weights that are infinite or not a number: a device computes wrongly, or "
            "training diverged; lower training.learning_rate, or leave the device out"
        )
    return values
