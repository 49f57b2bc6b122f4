"""Sends blobs to other hosts and fetches blobs. A transfer that broke off resumes where it stopped."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import grpc

from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError, PeerLostError
from collapipe.rpc import ChannelPool, within_silence
from collapipe.telemetry import metrics
from collapipe.tensors import CHUNK_BYTES
from collapipe.v1 import blob_pb2, blob_pb2_grpc
from collapipe.weights.blob_store import BlobStore

logger = logging.getLogger(__name__)

_MAX_BLOB_BYTES = 8 << 30
"""Largest blob that a host fetches."""

_TRIES = 3
_SILENCE_SECONDS = 10.0


class Readable(Protocol):
    """A blob, on disk or in memory."""

    @property
    def total_bytes(self) -> int: ...

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        """Yields the bytes from an offset on, in pieces of any size."""


class BlobServicer(blob_pb2_grpc.BlobServiceServicer):
    """Serves the blobs that `find` returns for a digest."""

    def __init__(self, find: Callable[[str], Readable]) -> None:
        self._find = find

    def FetchBlob(
        self, request: blob_pb2.FetchBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[blob_pb2.FetchBlobResponse]:
        """Sends a blob from an offset on, in chunks."""
        blob = self._find(request.digest)
        if request.offset > blob.total_bytes:
            raise InvalidInputError(
                f"offset {request.offset} is beyond the {blob.total_bytes} bytes of blob {request.digest}"
            )
        yield blob_pb2.FetchBlobResponse(total_bytes=blob.total_bytes)
        for piece in blob.read(request.offset):
            for start in range(0, len(piece), CHUNK_BYTES):
                chunk = bytes(piece[start : start + CHUNK_BYTES])
                metrics.BLOB_BYTES.labels("sent").inc(len(chunk))
                yield blob_pb2.FetchBlobResponse(chunk=chunk)


def fetch_blob(channels: ChannelPool, digest: str, addresses: Sequence[str]) -> bytes:
    """Fetches a blob into memory from the first address that has it.

    Raises:
        PeerLostError: The last host could not be reached, or became silent.
        NotFoundError: The last host does not have the blob, or there is no address.
        CorruptDataError: The bytes do not have that digest.
    """
    failure: Exception = NotFoundError(f"no address of a host with blob {digest} is known")
    for address in addresses:
        try:
            data = b"".join(_receive(channels, digest, address))
        except (NotFoundError, PeerLostError) as error:
            logger.info("blob %s was not fetched from %s: %s", digest[:12], address, error)
            failure = error
            continue
        if hashlib.sha256(data).hexdigest() != digest:
            raise CorruptDataError(
                f"blob {digest} arrived garbled from {address}: run the round again"
            )
        return data
    raise failure


def store_blob(store: BlobStore, channels: ChannelPool, digest: str, address: str) -> None:
    """Fetches a blob into a store unless it is stored already. Raises the errors of `fetch_blob`."""
    if digest not in store:
        store.put(digest, _receive(channels, digest, address))


def _receive(channels: ChannelPool, digest: str, address: str) -> Iterator[bytes]:
    stub = blob_pb2_grpc.BlobServiceStub(channels.channel(address))
    num_received = total_bytes = 0
    for tries_left in reversed(range(_TRIES)):
        request = blob_pb2.FetchBlobRequest(digest=digest, offset=num_received)
        try:
            answers = within_silence(
                stub.FetchBlob(request), _SILENCE_SECONDS, address, lambda: f"send blob {digest}"
            )
            for answer in answers:
                total_bytes = answer.total_bytes or total_bytes
                if total_bytes > _MAX_BLOB_BYTES:
                    raise CorruptDataError(
                        f"{address} announced {total_bytes} bytes for blob {digest}, "
                        f"over the limit of {_MAX_BLOB_BYTES}"
                    )
                chunk = answer.chunk
                num_received += len(chunk)
                if num_received > total_bytes:
                    raise CorruptDataError(
                        f"{address} sent {num_received} bytes of blob {digest}, but announced {total_bytes}"
                    )
                metrics.BLOB_BYTES.labels("received").inc(len(chunk))
                yield chunk
            return
        except PeerLostError:
            if not tries_left:
                raise
            time.sleep(0.2)
