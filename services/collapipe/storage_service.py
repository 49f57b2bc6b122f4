"""Tells the scheduler what this host has stored of a job."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from collapipe.v1 import storage_pb2, storage_pb2_grpc
from collapipe.weights.blob_store import JobStores

_MOST_CHARACTERS = 1 << 20
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
"""Who knows the digest of a blob may fetch it. So a client is told only its beginning, by which a person can compare blobs."""


def shorten_digests(text: str) -> str:
    """Returns a text with only the beginnings of the digests in it."""
    return _DIGEST.sub(r"\1...", text)


@dataclass(frozen=True)
class DumpedRow:
    """A row of a database.

    Args:
        round_index: The round that it is about; `None` if it is about the whole job.
        text: The row in JSON, or other text if it is damaged.
    """

    table: str
    round_index: int | None
    text: str

    def parts(self) -> Iterator[str]:
        """Yields the text in pieces that fit into a message, at least one, with only the beginnings of digests."""
        text = shorten_digests(self.text)
        for start in range(0, max(len(text), 1), _MOST_CHARACTERS):
            yield text[start : start + _MOST_CHARACTERS]


class StorageServicer(storage_pb2_grpc.StorageServiceServicer):
    """Serves the rows of one database.

    Args:
        stores: The jobs of this host.
        dump: Yields the rows of a job, from its id.
    """

    def __init__(self, stores: JobStores, dump: Callable[[str], Iterator[DumpedRow]]) -> None:
        self._stores = stores
        self._dump = dump

    def DumpRows(
        self, request: storage_pb2.DumpRowsRequest, context: grpc.ServicerContext
    ) -> Iterator[storage_pb2.DumpRowsResponse]:
        self._stores.directory(request.job_id)  # refuses a name that is no job's
        with self._stores.using(request.job_id):
            for row in self._dump(request.job_id):
                for part in row.parts():
                    yield storage_pb2.DumpRowsResponse(
                        table=row.table, round_index=row.round_index, document_json=part
                    )
