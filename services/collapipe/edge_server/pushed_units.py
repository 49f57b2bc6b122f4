"""Keeps the weights that the clusters push during an attempt, and averages each unit when all clusters have sent it.

If a round is committed without late clusters, the units are averaged at the commit.

A cluster may push an encoded delta instead of weights. It is decoded just before the average. With `averaging.secure`, all
clusters push masked changes. They are added at the commit, when the control units have revealed what removes the masks.

Everything lies in files apart from the committed blobs, in the folder `pushed` of the job. An older attempt is
refused. A newer attempt at the same round keeps the units that have arrived, until their cluster pushes them again; any
other attempt deletes them. Nothing here has to survive a crash: a round that was not committed runs again.
"""

import math
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from collapipe.attempts import order
from collapipe.documents import name_full_disk
from collapipe.edge_server.push_stream import Push, PushStream
from collapipe.edge_server.unit_averages import Averaged, average_masked_unit, average_unit
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.job import AveragingConfig
from collapipe.secure_aggregation.unmasking import RemainingMasks
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import edge_server_pb2, plan_pb2

_HEADER_BYTES = 1 << 20
"""What is pushed has no more bytes of tensors than the global weights, but its header may be longer by this."""


@dataclass(frozen=True)
class Unmasking:
    """What removes the masks from the sums of an attempt.

    Args:
        total_samples: As in `to_ring`.
    """

    masks: RemainingMasks
    total_samples: int


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
        self._pushes: dict[tuple[int, int], Push] = {}
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
                push = self._pushes[key] = Push(
                    unit.attempt,
                    unit.cluster_index,
                    path,
                    file,
                    unit.total_bytes,
                    unit.num_samples,
                    base_path,
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
            error = WrongStateError(
                f"unit {state.unit_index} of cluster {cluster.cluster_index} with digest "
                f"{state.weights_digest} and {cluster.num_samples} samples was not pushed by round "
                f"{attempt.round_index}, attempt {attempt.attempt}: run the round again"
            )
            # After a restart of the edge server, no cluster has pushed anything.
            error.cluster_index = cluster.cluster_index if self._pushes else None
            return error

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
                    "a newer attempt began while this one committed: end the older attempt"
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
                    span(average_unit), pushes, target, before, self._averaging_config
                )
            else:
                masks, total_samples = unmasking.masks.unit_masks(index), unmasking.total_samples
                averaged = self._averaging.submit(
                    span(average_masked_unit), pushes, target, before, masks, total_samples
                )
            self._averages[key] = averaged, self._syncing.submit(_synced, averaged)
        return self._averages[key][1]


def _synced(average: Future[Averaged]) -> Averaged:
    averaged = average.result()
    with name_full_disk(averaged.path), open(averaged.path, "rb") as file:
        os.fsync(file.fileno())
    return averaged
