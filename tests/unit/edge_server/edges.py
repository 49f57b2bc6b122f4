"""The global model of a job on the edge server, and clusters that pretend to train."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.global_model import GlobalModel
from collapipe.edge_server.pushed_units import PushedUnits
from collapipe.errors import WrongStateError
from collapipe.job import AveragingConfig, DataConfig, JobConfig, ModelConfig, TaskConfig
from collapipe.v1.edge_server_pb2 import CommitRoundRequest, PushedUnit
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit, DataCursor, UnitState
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
SAMPLES = [30, 10, 15]
OPTIMIZER = b"moments of the head"


class Edge:
    """The global model of one job, and clusters that pretend to train."""

    def __init__(self, state: Path, vocabulary: bytes, num_clusters: int = 2) -> None:
        self.state = state
        self._vocabulary = vocabulary
        self._num_clusters = num_clusters
        self.trained: dict[str, TensorBlob] = {}
        self.restart()

    def restart(self) -> None:
        directory = self.state / "jobs" / "job"
        self.store = BlobStore(directory / "blobs")
        self.commits = CommitStore(self.state)
        frozen = BlobCache(self.state / "frozen")
        self.model = GlobalModel(directory, self.commits, self.store, frozen)
        self.pushed = PushedUnits(
            directory / "pushed",
            self._num_clusters,
            [1 << 20] * 9,
            self.model.global_weights,
            self.model.weights_before,
            AveragingConfig(),
        )

    def prepare(self, seed: int = 0, *, labels: Sequence[str] = ("a", "b"), **model: Any) -> Commit:
        job = JobConfig(
            seed=seed,
            clusters=self._num_clusters,
            task=TaskConfig(kind="classification", max_length=12),
            data=DataConfig(source="stdlib_docstrings"),
            model=ModelConfig(**{"config": TINY, **model}),
        )
        self.model.prepare(job, labels, self._vocabulary)
        return self.model.commit()

    def weights(self, units: Iterable[UnitState]) -> dict[str, Tensor]:
        """Returns the weights of units that are committed or trained."""
        tensors: dict[str, Tensor] = {}
        for unit in units:
            blob = self.trained.get(unit.weights_digest)
            pieces = self.store.read(unit.weights_digest) if blob is None else blob.read()
            tensors |= load_tensors(b"".join(pieces))
        return tensors

    def train(self, cluster_index: int) -> ClusterState:
        """Changes all weights at random, and returns the state that a cluster would prepare."""
        state = ClusterState(
            cluster_index=cluster_index,
            num_samples=SAMPLES[cluster_index],
            step_index=7 + cluster_index,
            cursor=DataCursor(epoch=1, offset=2, num_rows=SAMPLES[cluster_index]),
        )
        commit = self.model.commit()
        generator = torch.Generator().manual_seed(cluster_index + 10 * commit.num_rounds)
        for unit in commit.global_units:
            changed = {
                name: tensor + torch.randn(tensor.shape, generator=generator)
                if tensor.is_floating_point()
                else tensor
                for name, tensor in load_file(self.store.path(unit.weights_digest)).items()
            }
            blob = TensorBlob(changed)
            self.trained[blob.digest] = blob
            state.units.append(UnitState(unit_index=unit.unit_index, weights_digest=blob.digest))
        state.units[-1].optimizer_digest = self.store.put_bytes(OPTIMIZER + bytes([cluster_index]))
        return state

    def train_all(self) -> list[ClusterState]:
        return [self.train(index) for index in range(self._num_clusters)]

    def commit(
        self,
        clusters: list[ClusterState],
        round_index: int = 0,
        attempt: int = 2,
        store_moments: Callable[[Commit], None] = lambda commit: None,
        **request: Any,
    ) -> Commit:
        """Commits a round. Each cluster has pushed its units before, the last cluster first.

        Args:
            request: Further fields of the request.
        """
        asking = Attempt(job_id="job", round_index=round_index, attempt=attempt)
        with suppress(WrongStateError):  # `commit_round` refuses the attempt, too
            self.model.check_is_next(asking)
            for cluster in reversed(clusters):
                if cluster.cluster_index not in request.get("late_clusters", ()):
                    self.push(asking, cluster)
        return self.commit_pushed(asking, clusters, store_moments, **request)

    def commit_pushed(
        self,
        attempt: Attempt,
        clusters: list[ClusterState],
        store_moments: Callable[[Commit], None] = lambda commit: None,
        **request: Any,
    ) -> Commit:
        """Commits a round with what is pushed already."""
        asked = CommitRoundRequest(
            attempt=attempt, clusters=clusters, **{"keep_commits": 1, **request}
        )
        return self.model.commit_round(asked, self.pushed, store_moments=store_moments)

    def run_round(self, round_index: int = 0, attempt: int = 2, **request: Any) -> Commit:
        """Trains all clusters, and commits what they have pushed."""
        return self.commit(self.train_all(), round_index, attempt, **request)

    def push(self, attempt: Attempt, cluster: ClusterState) -> None:
        for unit in cluster.units:
            blob = self.trained[unit.weights_digest]
            announced = PushedUnit(
                attempt=attempt,
                cluster_index=cluster.cluster_index,
                unit_index=unit.unit_index,
                total_bytes=blob.total_bytes,
                num_samples=cluster.num_samples,
            )
            stream = self.pushed.begin(announced)
            for piece in blob.read(stream.received_bytes):
                stream.write(piece)
            stream.complete(blob.digest)

    def blobs(self) -> set[str]:
        return {path.name for path in self.store.files()}
