"""Makes the global model of a job, averages it every round, and exports it.

The directory of a job contains `job.json` (the model and its vocabulary), `commit.json` (the last commit) and
the blobs that they refer to. Only the replacement of `commit.json` commits a round.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from safetensors import safe_open
from tokenizers import Tokenizer

from collapipe.aggregation import federated_average
from collapipe.documents import read_document, write_document
from collapipe.errors import InvalidInputError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.models import adapter_for, create_config_json, initial_model, join_model, split_state
from collapipe.tasks import write_tokenizer_files
from collapipe.v1 import plan_pb2
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob, load_tensors


class GlobalModel:
    """The global model of one job, in the directory and the blob store of the job."""

    def __init__(self, directory: Path, store: BlobStore) -> None:
        self._directory = directory
        self._store = store

    def prepare(
        self, job_id: str, job: JobConfig, labels: Sequence[str], vocabulary: bytes
    ) -> None:
        """Makes the initial model and commits it, unless the job has a commit already.

        Raises:
            InvalidInputError: The model of the job cannot be made.
        """
        if (self._directory / "commit.json").exists():
            return
        config_json = create_config_json(
            job.model, job.task, labels, Tokenizer.from_str(vocabulary.decode())
        )
        adapter = adapter_for(job.model.family, job.task.kind, config_json)
        model = initial_model(adapter, job.model.pretrained, job.seed)
        units = [
            plan_pb2.UnitState(unit_index=index, weights_digest=self._put(TensorBlob(state)))
            for index, state in enumerate(split_state(adapter, model))
        ]
        write_document(
            self._directory / "job.json",
            {
                "model": {
                    "family": job.model.family,
                    "task": job.task.kind,
                    "config_json": config_json,
                },
                "num_blocks": adapter.num_blocks,
                "vocabulary_digest": self._store.put_bytes(vocabulary),
                "max_length": job.task.max_length,
            },
        )
        clusters = [
            plan_pb2.ClusterState(cluster_index=index, units=units) for index in range(job.clusters)
        ]
        self._write_commit(plan_pb2.Commit(job_id=job_id, global_units=units, clusters=clusters))

    def commit(self) -> plan_pb2.Commit:
        """Returns the last commit; raises `NotFoundError`."""
        document = read_document(self._directory / "commit.json")
        if document is None:
            raise NotFoundError(
                f"the edge server has no commit of job {self._directory.name}: submit the job first"
            )
        return json_format.ParseDict(document, plan_pb2.Commit())

    def model_spec(self) -> tuple[plan_pb2.ModelSpec, int]:
        """Returns the model and its number of blocks; raises `NotFoundError`."""
        document = self._job_document()
        return plan_pb2.ModelSpec(**document["model"]), int(document["num_blocks"])

    def commit_round(
        self,
        attempt: plan_pb2.Attempt,
        clusters: Sequence[plan_pb2.ClusterState],
        fetch: Callable[[], None],
    ) -> plan_pb2.Commit:
        """Averages the prepared states of all clusters and commits the result.

        A repeated request changes nothing.

        Args:
            clusters: The state of each cluster, in cluster order.
            fetch: Fetches the weights of all clusters into the store.

        Raises:
            WrongStateError: The round is not the next one.
            InvalidInputError: A cluster is missing, or no cluster has samples.
        """
        last = self.commit()
        if (attempt.round_index + 1, attempt.attempt) == (last.num_rounds, last.attempt):
            return last
        if attempt.round_index != last.num_rounds:
            raise WrongStateError(
                f"round {attempt.round_index}, attempt {attempt.attempt} cannot be committed: "
                f"{last.num_rounds} rounds are committed, the last by attempt {last.attempt}, so the "
                f"next is round {last.num_rounds}"
            )
        indices = [cluster.cluster_index for cluster in clusters]
        if indices != list(range(len(last.clusters))):
            raise InvalidInputError(
                f"clusters {indices} prepared round {attempt.round_index}, but a commit needs all of "
                f"{list(range(len(last.clusters)))}, in this order"
            )
        fetch()
        global_units = [
            self._average(unit_index, clusters) for unit_index in range(len(last.global_units))
        ]
        commit = plan_pb2.Commit(
            job_id=last.job_id,
            num_rounds=last.num_rounds + 1,
            global_units=global_units,
            attempt=attempt.attempt,
        )
        for cluster in clusters:
            state = commit.clusters.add()
            state.CopyFrom(cluster)
            for unit, averaged in zip(state.units, global_units, strict=True):
                unit.weights_digest = averaged.weights_digest
        self._write_commit(commit)
        self._delete_unreferenced_blobs(commit)
        return commit

    def export(self, directory: Path) -> None:
        """Writes the model and the vocabulary to a directory, as `save_pretrained` does."""
        document = self._job_document()
        model_spec, _ = self.model_spec()
        adapter = adapter_for(model_spec.family, model_spec.task, model_spec.config_json)
        units = self.commit().global_units
        model = join_model(
            adapter, (load_tensors(self._store.read_checked(unit.weights_digest)) for unit in units)
        )
        model.save_pretrained(directory)
        vocabulary = self._store.read_checked(document["vocabulary_digest"])
        write_tokenizer_files(directory, vocabulary, model_spec.family, document["max_length"])

    def _average(
        self, unit_index: int, clusters: Sequence[plan_pb2.ClusterState]
    ) -> plan_pb2.UnitState:
        digests = [cluster.units[unit_index].weights_digest for cluster in clusters]
        if len(set(digests)) == 1:  # Equal states are their own average.
            return plan_pb2.UnitState(unit_index=unit_index, weights_digest=digests[0])
        with ExitStack() as stack:
            files = [
                stack.enter_context(safe_open(self._store.path(digest), "pt")) for digest in digests
            ]
            averaged = federated_average(
                files[0].keys(),
                [file.get_tensor for file in files],
                [cluster.num_samples for cluster in clusters],
            )
        return plan_pb2.UnitState(
            unit_index=unit_index, weights_digest=self._put(TensorBlob(averaged))
        )

    def _put(self, blob: TensorBlob) -> str:
        if blob.digest not in self._store:
            self._store.put(blob.digest, blob.read())
        return blob.digest

    def _job_document(self) -> dict[str, Any]:
        document = read_document(self._directory / "job.json")
        if document is None:
            raise NotFoundError(
                f"the edge server does not know job {self._directory.name}: `collapipe status` lists the jobs"
            )
        return document

    def _write_commit(self, commit: plan_pb2.Commit) -> None:
        document = json_format.MessageToDict(commit, preserving_proto_field_name=True)
        write_document(self._directory / "commit.json", document)

    def _delete_unreferenced_blobs(self, commit: plan_pb2.Commit) -> None:
        units = [*commit.global_units, *(unit for c in commit.clusters for unit in c.units)]
        keep = {digest for unit in units for digest in (unit.weights_digest, unit.optimizer_digest)}
        self._store.keep_only(keep | {self._job_document()["vocabulary_digest"]})
