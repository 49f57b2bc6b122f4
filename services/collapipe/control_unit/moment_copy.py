"""Copies the optimizer states of a commit to the disk of the control unit, beside the training.

Devices keep their units in memory only. When all clusters have such copies of one commit, that commit becomes the
restore point, from which a resumed job continues. The weights of the commit are on the edge server's disk already.
"""

import logging
import threading
from collections.abc import Sequence

from collapipe.errors import CollapipeError
from collapipe.stage_host import HostResources
from collapipe.v1 import plan_pb2
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.transfer import store_blob

logger = logging.getLogger(__name__)


class MomentCopy:
    """The copy of one candidate, in a thread of its own.

    Args:
        candidate: The state of the cluster whose optimizer states are copied.
        stages: The stages that have them.
        edge_address: Address of the edge server, which stores those of its own units by itself.
        silence_seconds: Longest time in which no byte arrives.
    """

    def __init__(
        self,
        candidate: plan_pb2.ClusterState,
        stages: Sequence[plan_pb2.Stage],
        edge_address: str,
        resources: HostResources,
        store: BlobStore,
        silence_seconds: float,
    ) -> None:
        self.candidate = candidate
        self.is_complete = False
        self.copied_bytes = 0
        self._stages = stages
        self._edge_address = edge_address
        self._resources = resources
        self._store = store
        self._silence_seconds = silence_seconds
        self._cancelled = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moment copy", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether the copy has ended, or will end, before it is complete."""
        return (self._cancelled or self._ended.is_set()) and not self.is_complete

    def start(self) -> None:
        """Starts the copy, once. Every stage must be configured, so that it keeps the states."""
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def cancel(self) -> None:
        """Makes the copy end before its next blob."""
        self._cancelled = True

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the copy, complete or not. Returns whether it has ended."""
        return self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            for stage in self._stages:
                for state in self.candidate.units[stage.start_unit : stage.stop_unit]:
                    if self._cancelled:
                        return
                    if state.optimizer_digest and stage.address != self._edge_address:
                        self._copy(state.optimizer_digest, stage)
            self.is_complete = True
        except (CollapipeError, OSError) as error:
            logger.warning("the restore point stays where it is: %s", error)
        finally:
            self._ended.set()

    def _copy(self, digest: str, stage: plan_pb2.Stage) -> None:
        if digest in self._store:
            return
        resources = self._resources
        if stage.host_id == resources.host_id:
            self._store.put(digest, resources.held_blob(digest).read(), is_checked=True)
        else:
            store_blob(
                self._store,
                resources.channels,
                digest,
                [stage.address],
                self._silence_seconds,
                self._count,
            )

    def _count(self, num_bytes: int) -> None:
        self.copied_bytes += num_bytes
