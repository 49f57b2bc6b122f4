"""The resources that all sessions on one host share."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from collapipe.errors import NotFoundError
from collapipe.job import JobConfig, TrainingConfig
from collapipe.job_files import check_job_files
from collapipe.models import ModelAdapter, adapter_for, read_frozen
from collapipe.rpc import ChannelPool
from collapipe.stage_runtime import ComputeDevice, EmulatedProcessor, ResidentUnits
from collapipe.telemetry.spans import SPANS
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1 import edge_server_pb2, stage_pb2
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore, JobStores
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import Readable

logger = logging.getLogger(__name__)


class HostResources:
    """The processor, the channels, the links, the units in memory and the disk of one host.

    Args:
        frozen: The frozen weights on the disk.
        stores: The disk that keeps units. A device has none, and keeps what it trains in memory only.
        model_dir: A folder with pretrained directories, where frozen weights may be, too.
        data_root: The folder outside of which no job reads files. `None` for no bound.
        busy_watts: Power above idle while the host computes, if no sensor measures it. 0 means unknown.
    """

    def __init__(
        self,
        device: ComputeDevice,
        channels: ChannelPool,
        links: OutgoingLinks,
        frozen: BlobCache,
        stores: JobStores | None = None,
        busy_watts: float = 0.0,
        model_dir: Path | None = None,
        data_root: Path | None = None,
    ) -> None:
        self.host_id = links.host_id
        self.device = device
        self.channels = channels
        self.frozen = frozen
        self.links = links
        self.busy_watts = busy_watts
        self.processor = EmulatedProcessor(links.emulation, links.host_id)
        self.keep_unit: Callable[[edge_server_pb2.PushedUnit, TensorBlob], None] | None = None
        """Takes the new weights of the host's own units. Only the edge server sets it; others push weights to it."""
        self._stores = stores
        self._model_dir = model_dir
        self._data_root = data_root
        self._lock = threading.Lock()
        self._job_of_clusters: dict[int, str] = {}
        self._units_of_clusters: dict[int, ResidentUnits] = {}
        """By the cluster of the deployment, like `_job_of_clusters`. Only an edge server has several."""

    def resident_units(
        self, configure: stage_pb2.ConfigureStage, training: TrainingConfig
    ) -> ResidentUnits:
        """Returns the units of a job and cluster. All units of the job that had the cluster before are dropped."""
        cluster, job_id = configure.host_cluster, configure.attempt.job_id
        with self._lock:  # An edge server opens the sessions of all clusters at once.
            before = self._job_of_clusters.get(cluster, job_id)
            if before != job_id:
                SPANS.end_job(before)
                for index, owner in list(self._job_of_clusters.items()):
                    if owner == before:
                        del self._job_of_clusters[index], self._units_of_clusters[index]
            if cluster not in self._units_of_clusters:
                model = configure.model
                adapter = adapter_for(model.family, model.task, model.config_json)
                units = ResidentUnits(adapter, training, self.device)
                self._job_of_clusters[cluster] = job_id
                self._units_of_clusters[cluster] = units
            return self._units_of_clusters[cluster]

    def check_files(self, job: JobConfig, cluster_index: int | None = None) -> None:
        """Refuses a job that would read files of this host that it may not; see `check_job_files`."""
        check_job_files(job, self.data_folders, cluster_index)

    @property
    def data_folders(self) -> list[Path]:
        """The folders outside of which no job reads files; empty for no bound."""
        folders = (self._data_root, self._model_dir) if self._data_root else ()
        return [folder for folder in folders if folder is not None]

    def local_frozen(
        self, name: str, adapter: ModelAdapter, unit_index: int, digest: str
    ) -> TensorBlob | None:
        """Makes the frozen weights of a unit from a pretrained directory on this host.

        Args:
            name: Name of the directory.
        """
        if self._model_dir is None or not name:
            return None
        try:
            # The name comes from another host, so it must be that of an entry of the folder.
            directory = next((d for d in self._model_dir.iterdir() if d.name == name), None)
            if directory is None:
                raise NotFoundError(f"{self._model_dir} has no directory {name!r}")
            blob = TensorBlob(read_frozen(adapter, unit_index, directory))
            if blob.digest != digest:
                raise NotFoundError(f"{directory} has other weights than the job")
        except (OSError, NotFoundError) as error:
            logger.warning("the weights of unit %d are fetched: %s", unit_index, error)
            return None
        return blob

    def find_blob(self, digest: str, *, for_outsider: bool = False) -> Readable:
        """Finds a blob on the disk, then among the units in memory; raises `NotFoundError`.

        Args:
            for_outsider: Finds no blob that is hidden from hosts outside of the cluster.
        """
        if digest in self.frozen:
            return self.frozen.find(digest)
        if self._stores is not None:
            # A file does not change. A unit in memory does if another job has equal weights and trains while they are read.
            with suppress(NotFoundError):
                return self._stores.find(digest, for_outsider=for_outsider)
        return self.held_blob(digest, for_outsider=for_outsider)

    def held_blob(
        self, digest: str, *, for_outsider: bool = False, job_id: str | None = None
    ) -> Readable:
        """Finds a blob among the units in memory; raises `NotFoundError`.

        Args:
            for_outsider: As in `find_blob`.
            job_id: The job whose units are searched. `None` for all.
        """
        for cluster, units in list(self._units_of_clusters.items()):
            if for_outsider and units.are_hidden:
                continue
            if job_id is not None and self._job_of_clusters.get(cluster) != job_id:
                continue
            with suppress(NotFoundError):
                return units.blob(digest)
        raise NotFoundError(f"blob {digest} is not held by {self.host_id}")

    def using(self, job_id: str) -> AbstractContextManager[None]:
        """Keeps what this host has of a job on the disk from being deleted meanwhile."""
        return self._stores.using(job_id) if self._stores else nullcontext()

    def store(self, job_id: str) -> BlobStore | None:
        """Returns the blobs of a job on the disk; `None` if this host keeps nothing on a disk."""
        return self._stores.store(job_id) if self._stores else None
