"""Receives what a cluster pushes of a unit. If a stream breaks, the next one brings the rest."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from collapipe.documents import name_full_disk
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.telemetry import metrics
from collapipe.v1 import edge_server_pb2, plan_pb2
from collapipe.weights.blob_store import Buffer
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import ACKNOWLEDGE_BYTES

_ACKNOWLEDGE_SECONDS = 0.2
"""A sender is told how far its push is after this time, or after `ACKNOWLEDGE_BYTES`."""


@dataclass
class Push:
    """The weights of one unit of one cluster, as far as they have arrived."""

    attempt: plan_pb2.Attempt
    cluster_index: int
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

    def __init__(self, push: Push, on_complete: Callable[[], None]) -> None:
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
            raise WrongStateError(
                "a newer stream brings this unit, or a newer attempt has begun: end this stream"
            )


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
            if not chunk:  # They could go on for ever.
                raise InvalidInputError(
                    f"a push of unit {first.unit.unit_index} goes on with {request.WhichOneof('part') or 'nothing'} of 0 bytes, but "
                    "each message needs at least 1 byte of the unit: run the same version everywhere"
                )
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
