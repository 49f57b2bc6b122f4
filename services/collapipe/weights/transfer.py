"""Sends blobs to other hosts and fetches blobs. A transfer that broke off resumes where it stopped."""

import hashlib
import io
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

import grpc

from collapipe.errors import (
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    PeerFaultyError,
    PeerLostError,
)
from collapipe.pretrained_directories import MAX_VOCABULARY_BYTES
from collapipe.rpc import ChannelPool, is_of_cluster, link_to_caller, within_silence
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import CHUNK_BYTES
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    edge_server_pb2,
    edge_server_pb2_grpc,
    job_pb2,
)
from collapipe.weights.blob_store import BlobStore, StoredBlob
from collapipe.weights.tensor_blob import TensorBlob

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_BLOB_BYTES = 8 << 30
"""Largest blob that a host fetches."""

ACKNOWLEDGE_BYTES = 1 << 20
"""The edge server tells how far a push is at least after so many bytes."""

_MAX_UNACKNOWLEDGED_BYTES = 2 * ACKNOWLEDGE_BYTES
"""A sender is at most so far ahead of the edge server. Otherwise, gRPC would buffer the pushes of many clusters."""

_TRIES = 3
"""Transfers without a single new byte, after which a transfer is given up."""

_PAUSE_SECONDS = 0.2
DEFAULT_SILENCE_SECONDS = 10.0
"""How long a transfer may bring no byte, where no job says it."""


class Readable(Protocol):
    """A blob, on disk or in memory."""

    @property
    def total_bytes(self) -> int: ...

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        """Yields the bytes from an offset on, in pieces of any size."""


class BlobServicer(blob_pb2_grpc.BlobServiceServicer):
    """Serves the blobs that `find` returns for a digest.

    Args:
        links: The links over which the blobs leave; by default without limits.
        find_for_outsider: Replaces `find` for callers that are no hosts of `cluster`.
        cluster: The cluster of this host; `None` if it has none.
    """

    def __init__(
        self,
        find: Callable[[str], Readable],
        links: OutgoingLinks | None = None,
        find_for_outsider: Callable[[str], Readable] | None = None,
        cluster: int | None = None,
    ) -> None:
        self._find = find
        self._find_for_outsider = find_for_outsider or find
        self._cluster = cluster
        self._links = links or OutgoingLinks.unlimited()
        self._one_check = threading.Lock()

    def FetchBlob(
        self, request: blob_pb2.FetchBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[blob_pb2.FetchBlobResponse]:
        """Sends a blob from an offset on, in chunks."""
        cluster = self._cluster
        is_outsider = cluster is not None and not is_of_cluster(context, cluster)
        find = self._find_for_outsider if is_outsider else self._find
        blob = find(request.digest)
        if request.checks and isinstance(blob, StoredBlob):
            with self._one_check:  # Each takes a processor for as long as it reads the file.
                blob.check()
        if request.offset > blob.total_bytes:
            raise InvalidInputError(
                f"offset {request.offset} is beyond the {blob.total_bytes} bytes of blob {request.digest}"
            )
        link = link_to_caller(context, self._links)
        with SPANS.span("weights to others", "send a blob") as moved:
            yield blob_pb2.FetchBlobResponse(total_bytes=blob.total_bytes)
            for chunk in link.paced_weights(blob.read(request.offset), CHUNK_BYTES):
                metrics.BLOB_BYTES.labels("sent").inc(len(chunk))
                yield blob_pb2.FetchBlobResponse(chunk=chunk)
                moved.num_bytes += len(chunk)


def fetch_blob(
    channels: ChannelPool,
    digest: str,
    addresses: Sequence[str],
    silence_seconds: float = DEFAULT_SILENCE_SECONDS,
    go_on: Callable[[int], None] = lambda num_bytes: None,
    holder: str = "",
) -> bytes:
    """Fetches a blob into memory from the first address that has it.

    Args:
        silence_seconds: Longest time in which no byte arrives.
        go_on: Called with the size of each chunk. It may raise an error, which ends the transfer.
        holder: The address of the host that is to blame if no host has the blob. Empty if several could be.

    Raises:
        PeerLostError: A host could not be reached, became silent, or sent bytes of another digest, and no other one has the blob.
        PeerFaultyError: No host has the blob, and there is a `holder`.
        NotFoundError: No host has the blob, or only damaged copies, or there is no address.
    """

    def join(address: str, pieces: Iterator[bytes]) -> bytes:
        checksum, joined = hashlib.sha256(), io.BytesIO()
        for piece in pieces:
            checksum.update(piece)  # while the network brings the next piece
            joined.write(piece)
        if checksum.hexdigest() != digest:
            raise CorruptDataError(
                f"blob {digest} arrived garbled from {address}, also after that host had checked its copy: run the same version everywhere, "
                "or leave the host out"
            )
        return joined.getvalue()  # Without a copy, unlike a join of pieces.

    return _fetch(channels, digest, addresses, silence_seconds, go_on, join, holder=holder)


def store_blob(
    store: BlobStore,
    channels: ChannelPool,
    digest: str,
    addresses: Sequence[str],
    silence_seconds: float = DEFAULT_SILENCE_SECONDS,
    go_on: Callable[[int], None] = lambda num_bytes: None,
    max_bytes: int = _MAX_BLOB_BYTES,
    *,
    anew: bool = False,
) -> None:
    """Fetches a blob into a store unless it is stored already. Has the arguments and the errors of `fetch_blob`.

    Args:
        anew: Whether a stored blob is replaced, because it is damaged.
    """
    if anew or digest not in store:
        _fetch(
            channels,
            digest,
            addresses,
            silence_seconds,
            go_on,
            lambda _, pieces: store.put(digest, pieces),
            max_bytes,
        )


def fetch_vocabulary(store: BlobStore, channels: ChannelPool, source: job_pb2.BlobSource) -> bytes:
    """Returns a vocabulary, after fetching it into a store unless it is stored already. Has the errors of `fetch_blob`."""
    try:
        return store.read_checked(source.digest)
    except NotFoundError:
        pass
    except CorruptDataError as error:
        logger.warning("the vocabulary is fetched from %s: %s", source.address, error)
    limit = MAX_VOCABULARY_BYTES
    store_blob(store, channels, source.digest, [source.address], max_bytes=limit, anew=True)
    return store.read_checked(source.digest)


def _fetch(
    channels: ChannelPool,
    digest: str,
    addresses: Sequence[str],
    silence_seconds: float,
    go_on: Callable[[int], None],
    take: Callable[[str, Iterator[bytes]], T],
    max_bytes: int = _MAX_BLOB_BYTES,
    holder: str = "",
) -> T:
    """Returns what `take` makes of the bytes of a blob from the first address that has it, given both."""

    def pieces(received: Iterator[bytes]) -> Iterator[bytes]:
        for piece in received:
            go_on(len(piece))
            yield piece

    def fetch_from(address: str) -> T:
        # If a blob arrives garbled, the host checks its copy. So whoever has a damaged file tells its name.
        for checks in (False, True):
            try:
                with closing(
                    _receive(channels, digest, address, silence_seconds, max_bytes, checks=checks)
                ) as received:
                    return take(address, pieces(received))
            except CorruptDataError as error:
                garbled = str(error)
        raise PeerFaultyError(address, garbled)

    failures: dict[str, NotFoundError | PeerLostError] = {}
    for address in addresses:
        try:
            return fetch_from(address)
        except (NotFoundError, PeerLostError) as error:
            logger.info("blob %s was not fetched from %s: %s", digest[:12], address, error)
            failures[address] = error
    told = "; ".join(f"{address} says: {error}" for address, error in failures.items())
    text = (
        f"no host has blob {digest} ({told or 'no address is known'}): run the round again, go back to an earlier commit with "
        "`collapipe rollback` if the job has one, or start a new job"
    )
    try:
        # A host that was not reached may have had the blob.
        raise next(
            (each for each in failures.values() if isinstance(each, PeerLostError)),
            PeerFaultyError(holder, f"{holder} should have it: {text}")
            if holder
            else NotFoundError(text),
        )
    finally:
        failures.clear()  # Otherwise this frame and an error would keep each other, and the call, alive.


def push_unit(
    channels: ChannelPool,
    address: str,
    unit: edge_server_pb2.PushedUnit,
    blob: TensorBlob,
    silence_seconds: float,
    report: Callable[[int], None] = lambda received_bytes: None,
) -> None:
    """Sends the new weights of a unit to the edge server, and hashes them on the way.

    A transfer that broke off continues at the byte that the edge server reached.

    Args:
        unit: Announces the blob.
        report: Told how many bytes the edge server has. It may raise an error, which ends the transfer.

    Raises:
        PeerLostError: The edge server could not be reached, or received nothing for `silence_seconds`.
        WrongStateError: The edge server serves a newer attempt.
        CorruptDataError: The edge server received other bytes.
    """
    reached, tries_left = 0, _TRIES
    while True:
        received = reached
        try:
            for answer in _push(channels, address, unit, blob, silence_seconds):
                received = answer.received_bytes
                report(received)
                if answer.complete:
                    return
            raise PeerLostError(address, f"{address} ended the transfer of unit {unit.unit_index}")
        except PeerLostError as error:
            tries_left = _TRIES if received > reached else tries_left - 1
            reached = received
            if not tries_left:
                raise
            logger.info("the push of unit %d broke off: %s", unit.unit_index, error)
            report(reached)
            time.sleep(_PAUSE_SECONDS)


def _push(
    channels: ChannelPool,
    address: str,
    unit: edge_server_pb2.PushedUnit,
    blob: TensorBlob,
    silence_seconds: float,
) -> Iterator[edge_server_pb2.PushUnitResponse]:
    """Makes one call of PushUnit. Yields every answer."""
    link = channels.link(address)
    acknowledged: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def requests() -> Iterator[edge_server_pb2.PushUnitRequest]:
        yield edge_server_pb2.PushUnitRequest(unit=unit)
        reached = acknowledged.get()
        if reached is None:
            return
        if reached:
            logger.info("unit %d is pushed on from byte %d", unit.unit_index, reached)
        sent = reached
        for chunk in link.paced_weights(blob.read(sent), CHUNK_BYTES):
            sent += len(chunk)
            while sent - reached > _MAX_UNACKNOWLEDGED_BYTES:
                newer = acknowledged.get()
                if newer is None:
                    return
                reached = newer
            metrics.BLOB_BYTES.labels("sent").inc(len(chunk))
            yield edge_server_pb2.PushUnitRequest(chunk=chunk)
        yield edge_server_pb2.PushUnitRequest(digest=blob.digest)

    stub = edge_server_pb2_grpc.EdgeServerServiceStub(channels.channel(address, for_weights=True))
    call = stub.PushUnit(requests())
    try:
        for answer in within_silence(
            call, silence_seconds, address, lambda: f"receive unit {unit.unit_index}"
        ):
            acknowledged.put(answer.received_bytes)
            yield answer
    finally:
        # Otherwise the thread of gRPC that sends the requests would wait for ever.
        acknowledged.put(None)


def _told(answers: Iterator[blob_pb2.FetchBlobResponse]) -> Iterator[blob_pb2.FetchBlobResponse]:
    """Yields the answers of a host. One that says that its copy is damaged does not have the blob."""
    try:
        yield from answers
    except CorruptDataError as error:
        raise NotFoundError(str(error)) from error


def _receive(
    channels: ChannelPool,
    digest: str,
    address: str,
    silence_seconds: float,
    max_bytes: int,
    *,
    checks: bool,
) -> Generator[bytes, None, None]:
    num_received = total_bytes = 0
    tries_left = _TRIES
    while True:
        reached, is_announced = num_received, False
        stub = blob_pb2_grpc.BlobServiceStub(channels.channel(address, for_weights=True))
        request = blob_pb2.FetchBlobRequest(digest=digest, offset=reached, checks=checks)
        try:
            answers = within_silence(
                stub.FetchBlob(request), silence_seconds, address, lambda: f"send blob {digest}"
            )
            for answer in _told(answers):
                total_bytes = answer.total_bytes or total_bytes
                if total_bytes > max_bytes:
                    raise CorruptDataError(
                        f"{address} announced {total_bytes} bytes for blob {digest}, "
                        f"but at most {max_bytes} bytes are accepted: use a smaller model or vocabulary"
                    )
                chunk = answer.chunk
                if is_announced and not chunk:  # It would count as a sign of life.
                    raise CorruptDataError(
                        f"{address} sent 0 bytes as a piece of blob {digest}, but each piece needs at least 1: run the same version of "
                        "CollaPipe on all machines"
                    )
                is_announced = True
                num_received += len(chunk)
                if num_received > total_bytes:
                    raise CorruptDataError(
                        f"{address} sent {num_received} bytes of blob {digest}, but announced {total_bytes}"
                    )
                metrics.BLOB_BYTES.labels("received").inc(len(chunk))
                yield chunk
            return
        except PeerLostError:
            tries_left = _TRIES if num_received > reached else tries_left - 1
            if not tries_left:
                raise
            time.sleep(_PAUSE_SECONDS)
