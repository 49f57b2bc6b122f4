"""Keeps the weights that the clusters push during an attempt, and averages each unit when all clusters have sent it.

If a round is committed without late clusters, the units are averaged at the commit.

A cluster may push an encoded delta instead of weights. It is decoded just before the average. With `averaging.secure`, all
clusters push masked changes. They are added at the commit, when the control units have revealed what removes the masks.

Everything lies in files apart from the committed blobs, in the folder `pushed` of the job. An older attempt is
refused. A newer attempt at the same round keeps the units that have arrived, until their cluster pushes them again; any
other attempt deletes them. Nothing here has to survive a crash: a round that was not committed runs again.
"""

import hashlib
import math
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
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
from collapipe.attempts import order
from collapipe.documents import name_full_disk
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.job import AveragingConfig
from collapipe.secure_aggregation.fixed_point import from_ring
from collapipe.secure_aggregation.masks import MaskKeys, MaskStream
from collapipe.secure_aggregation.unmasking import RemainingMasks
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import edge_server_pb2, plan_pb2
from collapipe.weights.blob_store import Buffer
from collapipe.weights.delta_codecs import decode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors, read_layout
from collapipe.weights.transfer import ACKNOWLEDGE_BYTES

_HEADER_BYTES = 1 << 20
"""What is pushed has no more bytes of tensors than the global weights, but its header may be longer by this."""

_ACKNOWLEDGE_SECONDS = 0.2
"""A sender is told how far its push is after this time, or after `ACKNOWLEDGE_BYTES`."""

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


@dataclass(frozen=True)
class Unmasking:
    """What removes the masks from the sums of an attempt.

    Args:
        total_samples: As in `to_ring`.
    """

    masks: RemainingMasks
    total_samples: int


@dataclass
class _Push:
    """The weights of one unit of one cluster, as far as they have arrived."""

    attempt: plan_pb2.Attempt
    path: Path
    file: BinaryIO
    total_bytes: int
    num_samples: int
    base_path: Path | None
    """The weights that a delta or a masked change refers to. `None` if the weights themselves are pushed."""
    received_bytes: int = 0
    checksum: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    digest: str = ""
    """Set when everything has arrived and the digest is checked."""
    is_broken: bool = False
    """Whether its file may lack bytes, because the disk refused some."""
    turn: int = 0
    """Number of the stream that may write. A stream that broke off may still deliver something late."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class PushStream:
    """One stream that brings a unit, or the rest of it."""

    def __init__(self, push: _Push, on_complete: Callable[[], None]) -> None:
        self._push = push
        self._on_complete = on_complete
        with push.lock:
            push.turn += 1
            self._turn = push.turn

    @property
    def received_bytes(self) -> int:
        return self._push.received_bytes

    def write(self, chunk: Buffer) -> None:
        """Appends bytes.

        Raises:
            WrongStateError: A newer stream brings the same unit.
            CorruptDataError: There are more bytes than announced.
        """
        self._append(chunk, is_hashed=True)

    def complete(self, digest: str) -> None:
        """Checks the digest, and averages the unit if it was the last cluster's.

        Raises:
            WrongStateError: A newer stream brings the same unit.
            CorruptDataError: The bytes do not have that digest.
        """
        push = self._push
        if push.digest == digest:
            # The sender did not get the last answer, and asks again.
            self._on_complete()
            return
        found = push.checksum.hexdigest()
        if push.received_bytes != push.total_bytes or found != digest:
            raise CorruptDataError(
                f"{push.received_bytes} of {push.total_bytes} bytes were pushed with SHA-256 {found} instead of "
                f"{digest}: the network or the sender's memory garbles data; run the round again"
            )
        self._end(digest)

    def take(self, blob: TensorBlob) -> None:
        """Takes a whole blob of this host, which hashes itself. Raises the errors of `write`."""
        for piece in blob.read():
            self._append(piece, is_hashed=False)
        self._end(blob.digest)

    def _append(self, chunk: Buffer, *, is_hashed: bool) -> None:
        push = self._push
        with push.lock:
            self._check_turn()
            if push.received_bytes + len(chunk) > push.total_bytes:
                raise CorruptDataError(
                    f"more than the {push.total_bytes} announced bytes were pushed: run the round again"
                )
            with self._broken_on_error(), name_full_disk(push.path):
                push.file.write(chunk)
            push.received_bytes += len(chunk)
            if is_hashed:
                push.checksum.update(chunk)

    def _end(self, digest: str) -> None:
        push = self._push
        with push.lock:
            self._check_turn()
            with self._broken_on_error(), name_full_disk(push.path):
                push.file.close()
            push.digest = digest
        self._on_complete()

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._push.is_broken = True
            raise

    def _check_turn(self) -> None:
        if self._turn != self._push.turn:
            raise WrongStateError("a newer stream brings this unit, or a newer attempt has begun")


def receive_push(
    requests: Iterator[edge_server_pb2.PushUnitRequest],
    begin: Callable[[edge_server_pb2.PushedUnit], PushStream],
) -> Iterator[edge_server_pb2.PushUnitResponse]:
    """Serves one call of PushUnit. Raises the errors of `begin` and of `PushStream`."""
    first = next(requests, None)
    if first is None or first.WhichOneof("part") != "unit":
        raise InvalidInputError("a push begins with PushedUnit")
    stream = begin(first.unit)
    yield edge_server_pb2.PushUnitResponse(received_bytes=stream.received_bytes)
    acknowledged_at, acknowledged_bytes = time.monotonic(), stream.received_bytes
    for request in requests:
        is_complete = request.WhichOneof("part") == "digest"
        if is_complete:
            stream.complete(request.digest)
        else:
            chunk = request.chunk
            stream.write(chunk)
            metrics.BLOB_BYTES.labels("received").inc(len(chunk))
        is_due = (
            time.monotonic() - acknowledged_at > _ACKNOWLEDGE_SECONDS
            or stream.received_bytes - acknowledged_bytes >= ACKNOWLEDGE_BYTES
        )
        if is_complete or is_due:
            acknowledged_at, acknowledged_bytes = time.monotonic(), stream.received_bytes
            yield edge_server_pb2.PushUnitResponse(
                received_bytes=stream.received_bytes, complete=is_complete
            )


class PushedUnits:
    """The pushed units of one job.

    Args:
        directory: Folder for the files. It is emptied.
        num_clusters: Clusters whose units are averaged.
        unit_bytes: Size of the weights of each unit.
        find_base: Returns the file of the global weights of a unit, from its index and their digest. Raises an error
            if no round can begin with them.
        weights_before: Returns the file of the global weights with which an attempt began, from the attempt and the unit.
        averaging: How the clusters are averaged.
    """

    def __init__(
        self,
        directory: Path,
        num_clusters: int,
        unit_bytes: Sequence[int],
        find_base: Callable[[int, str], Path],
        weights_before: Callable[[plan_pb2.Attempt, int], Path],
        averaging: AveragingConfig,
    ) -> None:
        self._directory = directory
        self._num_clusters = num_clusters
        self._unit_bytes = unit_bytes
        self._find_base = find_base
        self._weights_before = weights_before
        self._averaging_config = averaging
        self._attempt: plan_pb2.Attempt | None = None
        self._lock = threading.Lock()
        self._pushes: dict[tuple[int, int], _Push] = {}
        self._averages: dict[
            tuple[int, tuple[int, ...]], tuple[Future[Averaged], Future[Averaged]]
        ] = {}
        """The average of a unit, before and after it is synced, by its index and the clusters in it."""
        self.changes: dict[int, float] = {}
        """Euclidean norm of what each cluster has changed in the whole model, as the last complete `averages` found it. It is empty
        if the changes are masked."""
        self._closed = False
        # One unit at a time is averaged, which bounds the memory. Meanwhile the one before is synced to the disk.
        self._averaging = ThreadPoolExecutor(1, "averaging")
        self._syncing = ThreadPoolExecutor(1, "syncing")
        shutil.rmtree(directory, ignore_errors=True)

    def begin(self, unit: edge_server_pb2.PushedUnit) -> PushStream:
        """Begins a push, or continues it if the same attempt has begun it already.

        Raises:
            WrongStateError: The attempt is older than the newest one, or the change is that of other weights.
            InvalidInputError: The announcement is wrong.
        """
        if unit.cluster_index >= self._num_clusters:
            raise InvalidInputError(
                f"cluster {unit.cluster_index} pushed a unit, but the job has {self._num_clusters} clusters: run the "
                "same version everywhere"
            )
        if unit.unit_index >= len(self._unit_bytes):
            raise InvalidInputError(
                f"the model has units 0 to {len(self._unit_bytes) - 1}, but cluster {unit.cluster_index} pushed unit "
                f"{unit.unit_index}: run the same version everywhere"
            )
        limit = self._unit_bytes[unit.unit_index] + _HEADER_BYTES
        if unit.total_bytes > limit:
            raise InvalidInputError(
                f"cluster {unit.cluster_index} announced {unit.total_bytes} bytes for unit {unit.unit_index}, whose "
                f"weights allow at most {limit}: run the same version everywhere"
            )
        base_path = None
        if unit.base_digest:
            base_path = self._find_base(unit.unit_index, unit.base_digest)
        with self._lock:
            self._enter(unit.attempt)
            key = unit.cluster_index, unit.unit_index
            push = self._pushes.get(key)
            if push is None or push.is_broken or order(push.attempt) != order(unit.attempt):
                self._forget(key)
                path = self._directory / f"cluster-{unit.cluster_index}-unit-{unit.unit_index}"
                file = open(path, "wb")  # noqa: SIM115  # `_end` or `_forget` closes it.
                push = self._pushes[key] = _Push(
                    unit.attempt, path, file, unit.total_bytes, unit.num_samples, base_path
                )
            announced = unit.total_bytes, unit.num_samples, base_path
            if (push.total_bytes, push.num_samples, push.base_path) != announced:
                raise InvalidInputError(
                    f"unit {unit.unit_index} of cluster {unit.cluster_index} was announced with "
                    f"{push.total_bytes} bytes and {push.num_samples} samples before, and now with "
                    f"{unit.total_bytes} bytes and {unit.num_samples} samples, or as the change of other weights"
                )
            # Inside the lock, so that a newer attempt cannot drop the push before the stream has its turn.
            return PushStream(push, lambda: self._average_if_complete(unit))

    def averages(
        self,
        attempt: plan_pb2.Attempt,
        clusters: Sequence[plan_pb2.ClusterState],
        unmasking: Unmasking | None = None,
    ) -> Iterator[Averaged]:
        """Yields the average of each unit over some clusters, in unit order, and waits until it is ready.

        Args:
            unmasking: For the masked changes of an attempt, else `None`.

        Raises:
            WrongStateError: A unit was not pushed with the given digest, by this attempt or an earlier one at its round.
            InvalidInputError: The states of the clusters cannot be averaged.
            CorruptDataError: What a cluster pushed is damaged, does not fit its unit, or is not finite.
        """

        def not_pushed(
            cluster: plan_pb2.ClusterState, state: plan_pb2.UnitState
        ) -> WrongStateError:
            return WrongStateError(
                f"unit {state.unit_index} of cluster {cluster.cluster_index} with digest "
                f"{state.weights_digest} and {cluster.num_samples} samples was not pushed by round "
                f"{attempt.round_index}, attempt {attempt.attempt}: run the round again"
            )

        self._check_unmasking(clusters, unmasking)
        with self._lock:
            self._enter(attempt)
            for cluster in clusters:
                for state in cluster.units:
                    push = self._pushes.get((cluster.cluster_index, state.unit_index))
                    # The digest of what a delta decodes to is known only after the decoding.
                    if push is None or not push.digest or push.num_samples != cluster.num_samples:
                        raise not_pushed(cluster, state)
                    if unmasking is not None and push.digest != state.weights_digest:
                        raise not_pushed(cluster, state)
            indices = [cluster.cluster_index for cluster in clusters]
            averages = [
                self._begin_average(state.unit_index, indices, unmasking)
                for state in clusters[0].units
            ]
        squares: defaultdict[int, float] = defaultdict(float)
        for position, average in enumerate(averages):
            try:
                averaged = average.result()
            except futures.CancelledError:
                raise WrongStateError(
                    "a newer attempt has begun while this one committed"
                ) from None
            for cluster, digest in zip(clusters, averaged.cluster_digests, strict=True):
                if cluster.units[position].weights_digest != digest:
                    raise not_pushed(cluster, cluster.units[position])
            for cluster, change in zip(clusters, averaged.changes, strict=False):  # none if masked
                squares[cluster.cluster_index] += change * change
            yield averaged
        self.changes = {cluster: math.sqrt(square) for cluster, square in squares.items()}

    def _check_unmasking(
        self, clusters: Sequence[plan_pb2.ClusterState], unmasking: Unmasking | None
    ) -> None:
        """Refuses an average of masked changes without what removes the masks, or the other way round."""
        if (unmasking is not None) != self._averaging_config.secure:
            raise InvalidInputError(
                f"averaging.secure is {str(self._averaging_config.secure).lower()}, but the commit came "
                f"{'without' if unmasking is None else 'with'} shares of masks: run the same version everywhere"
            )
        if unmasking is None:
            return
        indices = {cluster.cluster_index for cluster in clusters}
        if unmasking.masks.present != indices:
            raise InvalidInputError(
                f"the uploads of clusters {sorted(indices)} count, but clusters {sorted(unmasking.masks.present)} have revealed "
                "shares: both must be the same; run the round again"
            )
        num_samples = sum(cluster.num_samples for cluster in clusters)
        if not 0 < num_samples <= unmasking.total_samples:
            raise WrongStateError(
                f"the clusters have trained on {num_samples} rows, but in a round with masks these are 1 to "
                f"{unmasking.total_samples}, twice what the clusters had before: cancel the job and resume it, so that they count again"
            )

    def drop(self, attempt: plan_pb2.Attempt) -> None:
        """Deletes what an attempt pushed, because it was committed."""
        with self._lock:
            if self._attempt is not None and order(attempt) == order(self._attempt):
                self._drop()

    def close(self) -> None:
        """Deletes all files, and ends the averaging."""
        with self._lock:
            self._closed = True
            self._drop()
        for executor in (self._averaging, self._syncing):
            executor.shutdown(wait=False, cancel_futures=True)

    def _enter(self, attempt: plan_pb2.Attempt) -> None:
        """Makes an attempt the current one."""
        if self._closed:
            raise WrongStateError(f"another job has taken the clusters of job {attempt.job_id}")
        if self._attempt is not None and order(attempt) < order(self._attempt):
            raise WrongStateError(
                f"round {attempt.round_index}, attempt {attempt.attempt} is older than round "
                f"{self._attempt.round_index}, attempt {self._attempt.attempt}"
            )
        if self._attempt is None or order(attempt) > order(self._attempt):
            if self._attempt is None or attempt.round_index != self._attempt.round_index:
                self._drop()
            for key in [key for key, push in self._pushes.items() if not push.digest]:
                self._forget(key)
            with name_full_disk(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
            self._attempt = attempt

    def _forget(self, key: tuple[int, int]) -> None:
        """Deletes what was pushed of a unit of a cluster, and forgets the averages with it. Its stream may write no more."""
        push = self._pushes.pop(key, None)
        if push is None:
            return
        with push.lock:
            push.turn += 1
            with suppress(OSError):  # A full disk cannot take the last bytes either.
                push.file.close()
        push.path.unlink(missing_ok=True)
        cluster_index, unit_index = key
        for name in [name for name in self._averages if name[0] == unit_index]:
            if cluster_index in name[1]:
                for average in self._averages.pop(name):
                    average.cancel()

    def _drop(self) -> None:
        for key in list(self._pushes):
            self._forget(key)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _average_if_complete(self, unit: edge_server_pb2.PushedUnit) -> None:
        if self._averaging_config.secure:
            return
        index = unit.unit_index
        with self._lock:
            if self._attempt is None or order(unit.attempt) != order(self._attempt):
                return
            clusters = range(self._num_clusters)
            pushes = [self._pushes.get((cluster, index)) for cluster in clusters]
            if all(push is not None and push.digest for push in pushes):
                self._begin_average(index, clusters)

    def _begin_average(
        self, index: int, clusters: Sequence[int], unmasking: Unmasking | None = None
    ) -> Future[Averaged]:
        """Returns the average of a unit over clusters that have pushed it. Begins it unless it has begun already."""
        key = index, tuple(clusters)
        if key not in self._averages:
            target = self._directory / f"average-{index}"
            if len(clusters) < self._num_clusters:  # An average over all may still be written.
                target = target.with_name(f"{target.name}-of-{len(clusters)}")
            span = SPANS.span("averaging", "average", unit=index)
            pushes = [self._pushes[cluster, index] for cluster in clusters]
            assert self._attempt is not None
            before = self._weights_before(self._attempt, index)
            if unmasking is None:
                averaged = self._averaging.submit(
                    span(_average), pushes, target, before, self._averaging_config
                )
            else:
                masks, total_samples = unmasking.masks.unit_masks(index), unmasking.total_samples
                averaged = self._averaging.submit(
                    span(_unmasked_average), pushes, target, before, masks, total_samples
                )
            self._averages[key] = averaged, self._syncing.submit(_synced, averaged)
        return self._averages[key][1]


def _average(
    pushes: Sequence[_Push], target: Path, before: Path, averaging: AveragingConfig
) -> Averaged:
    """Averages one unit into a file, one slice of a tensor after the other.

    Args:
        before: The global weights of the unit with which the round began.
    """
    weights = [_weights(push) for push in pushes]
    digests = tuple(digest for _, digest in weights)
    norms: dict[str, float] = {}
    for path, digest in weights:
        if digest not in norms:
            norms[digest] = _norm_of_change(path, before)
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


def _unmasked_average(
    pushes: Sequence[_Push], target: Path, before: Path, masks: MaskKeys, total_samples: int
) -> Averaged:
    """Adds the masked changes of one unit, removes the masks that are left, and writes the average to a file.

    Args:
        before: As in `_average`.
        masks: What is left in the sum.
        total_samples: As in `to_ring`.

    Raises:
        CorruptDataError: A change has other tensors than the unit or refers to other weights, or a mask is left.
    """
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


def _synced(average: Future[Averaged]) -> Averaged:
    averaged = average.result()
    with name_full_disk(averaged.path), open(averaged.path, "rb") as file:
        os.fsync(file.fileno())
    return averaged


def _weights(push: _Push) -> tuple[Path, str]:
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
