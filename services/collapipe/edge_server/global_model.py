"""Makes the global model of a job, averages it every round, and exports it.

The database of the edge server has the model and the last commit of each job. The directory of a job has the blobs that they name.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from google.protobuf import json_format
from torch import Tensor

from collapipe.byte_sizes import say_bytes
from collapipe.edge_server.commit_store import REMEDY, CommitStore, JobDocument, Model
from collapipe.edge_server.commits import (
    began_with,
    check_is_next,
    following,
    going_to,
    initial_commit,
    is_already_committed,
    present_clusters,
    with_candidate_restorable,
)
from collapipe.edge_server.pushed_units import PushedUnits, Unmasking
from collapipe.edge_server.unit_averages import Averaged
from collapipe.errors import (
    CorruptDataError,
    InfeasibleError,
    WrongStateError,
)
from collapipe.job import AveragingConfig, JobConfig, ModelConfig
from collapipe.models import (
    ModelAdapter,
    TensorsOnDisk,
    adapter_for,
    changes_embeddings,
    create_config_json,
    divide_state,
    initial_model,
    join_model,
    quantisation_library,
    save_lora,
    split_state,
)
from collapipe.pretrained_directories import hub_name, pretrained_directory
from collapipe.rpc.finding_messages import to_message
from collapipe.tasks import declared_tokens, parse_vocabulary, write_tokenizer_files
from collapipe.v1 import edge_server_pb2, job_pb2, plan_pb2
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

_SHARD_BYTES = 500_000_000
"""Largest file of weights in an export, which is in memory while it is written."""

_MOST_GROWTH = 1e4
"""How many times larger the change of a unit may be than the largest one before. The learning rate of a warm-up grows by less,
and a damaged exponent of a number by more."""


class GlobalModel:
    """The global model of one job.

    Args:
        directory: The directory of the job, which has its name.
        commits: The models and commits of all jobs.
        store: The blobs of the job.
        frozen: The frozen weights of all jobs.
    """

    def __init__(
        self, directory: Path, commits: CommitStore, store: BlobStore, frozen: BlobCache
    ) -> None:
        self._directory = directory
        self._job_id = directory.name
        self._commits = commits
        self._store = store
        self._frozen = frozen

    def prepare(
        self,
        job: JobConfig,
        labels: Sequence[str],
        vocabulary: bytes,
        owner: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the initial model and commits it, unless the job has a commit already that fits.

        The answer to an earlier call may have been lost, and the data may have grown since. Then the model is made anew.

        Args:
            owner: Who may export the model, such as "client:me". Empty if anybody may.
            check: Called again and again meanwhile. Its error ends the work.

        Raises:
            InvalidInputError: The model of the job cannot be made.
            InfeasibleError: The disk cannot hold the initial model and the first averages.
            WrongStateError: Rounds are committed, and the model was made of another vocabulary or of other labels.
        """
        if self._is_made_of(labels, vocabulary):
            if not self._has_frozen():
                self._restore_frozen(job, check)
            return
        config_json = create_config_json(
            job.model,
            job.task,
            labels,
            parse_vocabulary(vocabulary),
            declared_tokens(vocabulary),
        )
        adapter = adapter_for(job.model.family, job.task.kind, config_json)
        if adapter.quantises_base:
            quantisation_library()  # The export needs it.
        self._check_disk(adapter)
        units = self._put_initial_units(adapter, job, check)
        findings = []
        if job.model.pretrained is not None:
            findings = adapter.describe_pretrained(pretrained_directory(job.model.pretrained))
        document = JobDocument(
            job_id=self._job_id,
            model=Model(
                family=job.model.family,
                task=job.task.kind,
                config_json=config_json,
                pretrained=_directory_name(job.model),
            ),
            num_blocks=adapter.num_blocks,
            vocabulary_digest=self._store.put_bytes(vocabulary),
            max_length=job.task.max_length,
            adapter_base=_adapter_base(adapter, job.model),
            averaging=job.averaging,
            owner=owner,
            findings=[json_format.MessageToDict(to_message(each)) for each in findings],
        )
        self._commits.add(document, initial_commit(self._job_id, units, job.clusters))

    def is_complete(self, labels: Sequence[str], vocabulary: bytes) -> bool:
        """Returns whether `prepare` has nothing to do; raises its `WrongStateError`."""
        return self._is_made_of(labels, vocabulary) and self._has_frozen()

    def _has_frozen(self) -> bool:
        return all(digest in self._frozen for digest in self._frozen_digests())

    def _is_made_of(self, labels: Sequence[str], vocabulary: bytes) -> bool:
        """Returns whether the job has a model that was made of these. Raises the `WrongStateError` of `prepare`."""
        if not self._commits.has(self._job_id):
            return False
        document = self._job_document()
        named = json.loads(document.model.config_json).get("id2label", {})
        if document.vocabulary_digest == hashlib.sha256(vocabulary).hexdigest() and (
            not labels or named == {str(index): label for index, label in enumerate(labels)}
        ):
            return True
        if num_rounds := self._commits.head(self._job_id).num_rounds:
            raise WrongStateError(
                f"the model of job {self._job_id} has {num_rounds} committed rounds, and was made of another vocabulary or of other "
                "labels than those of the scheduler: start the scheduler with the state directory that it had, or start a new job"
            )
        return False

    def _check_disk(self, adapter: ModelAdapter) -> None:
        """Refuses a job whose first commit cannot be stored, before anything is computed."""
        trained = frozen = 0
        for index, state in enumerate(split_state(adapter, adapter.meta_model)):
            parts = divide_state(state, adapter.frozen_names(index))
            trained, frozen = (
                number + sum(tensor.nbytes for tensor in tensors.values())
                for number, tensors in zip((trained, frozen), parts, strict=True)
            )
        needed = 2 * trained + frozen
        self._directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise InfeasibleError(
                f"the disk of {self._directory} has {say_bytes(free)} free, but the initial model and the averages of the first round need at "
                f"least {say_bytes(needed)}, because the model has {say_bytes(trained)} of trained and {say_bytes(frozen)} of frozen weights: "
                "make room there, for example with `collapipe jobs delete`, use another disk, or train a smaller model"
            )

    def owner(self) -> str:
        """Returns who may export the model, such as "client:me"; "" if anybody may."""
        return self._job_document().owner

    def findings(self) -> list[job_pb2.Finding]:
        """Returns what a person should know about how the pretrained weights are used.

        Raises:
            CorruptDataError: A finding is damaged.
        """
        try:
            return [
                json_format.ParseDict(each, job_pb2.Finding(), ignore_unknown_fields=True)
                for each in self._job_document().findings
            ]
        except (json_format.ParseError, AttributeError, TypeError) as error:
            raise CorruptDataError(
                f"the findings of job {self._job_id} are damaged ({error}): {REMEDY}"
            ) from error

    def _put_initial_units(
        self, adapter: ModelAdapter, job: JobConfig, check: Callable[[], None]
    ) -> list[plan_pb2.UnitState]:
        """Makes the initial model, and stores each unit."""
        units = []
        with TensorsOnDisk(self._directory, check) as disk:
            model = initial_model(adapter, job.model.pretrained, job.seed)
            for index, state in enumerate(split_state(adapter, model)):
                trained, frozen = divide_state(state, adapter.frozen_names(index))
                weights = TensorBlob(trained)
                if weights.digest not in self._store:
                    self._store.put(weights.digest, weights.read(), is_checked=True)
                frozen_digest = ""
                if frozen:
                    blob = TensorBlob(frozen)
                    frozen_digest = blob.digest
                    self._frozen.file(frozen_digest, partial(_put_checked, blob))
                units.append(
                    plan_pb2.UnitState(
                        unit_index=index, weights_digest=weights.digest, frozen_digest=frozen_digest
                    )
                )
                disk.release()
        return units

    def _restore_frozen(self, job: JobConfig, check: Callable[[], None]) -> None:
        """Makes the frozen weights of the job again; raises `NotFoundError` if that fails."""
        spec, _ = self.model_spec()
        adapter = adapter_for(spec.family, spec.task, spec.config_json)
        self._put_initial_units(adapter, job, check)
        for digest in self._frozen_digests():
            self._frozen.find(digest)

    def _frozen_digests(self) -> set[str]:
        return {unit.frozen_digest for unit in self.commit().global_units} - {""}

    def commit(self) -> plan_pb2.Commit:
        """Returns the last commit; raises `NotFoundError` or `CorruptDataError`."""
        return self._commits.commit(self._job_id)

    def unit_bytes(self) -> list[int]:
        """Returns the size of the trained weights of each unit; raises `NotFoundError`."""
        units = self.commit().global_units
        return [self._store.total_bytes(unit.weights_digest) for unit in units]

    def stored_bytes(self) -> int:
        """Returns the bytes of all blobs of the job. Frozen weights, which jobs share, do not count."""
        return sum(self._store.total_bytes(path.name) for path in self._store.files())

    def frozen_bytes(self) -> list[int]:
        """Returns the size of the frozen weights of each unit; raises `NotFoundError`."""
        digests = [unit.frozen_digest for unit in self.commit().global_units]
        return [self._frozen.find(digest).total_bytes if digest else 0 for digest in digests]

    def global_weights(self, unit_index: int, digest: str) -> Path:
        """Returns the file of a unit's weights, with which the next round begins.

        Raises:
            WrongStateError: Neither the last commit nor the restore point, where a resumed job begins, has them.
        """
        head = self._commits.head(self._job_id)
        if digest in (head.weights[unit_index], head.restorable_weights[unit_index]):
            return self._store.path(digest)
        raise WrongStateError(
            f"neither the last commit nor the restore point gives unit {unit_index} the weights {digest}: run the "
            "round again"
        )

    def averaging(self) -> AveragingConfig:
        """Returns how the clusters are averaged; raises `NotFoundError`."""
        return self._job_document().averaging

    def weights_before(self, attempt: plan_pb2.Attempt, unit_index: int) -> Path:
        """Returns the file of a unit's weights with which an attempt at a round began; raises `NotFoundError`."""
        head = self._commits.head(self._job_id)
        is_next = attempt.round_index == head.num_rounds
        weights = head.weights if is_next else head.restorable_weights
        return self._store.path(weights[unit_index])

    def model_spec(self) -> tuple[plan_pb2.ModelSpec, int]:
        """Returns the model and its number of blocks; raises `NotFoundError`."""
        document = self._job_document()
        return plan_pb2.ModelSpec(**document.model.model_dump()), document.num_blocks

    def commit_round(
        self,
        request: edge_server_pb2.CommitRoundRequest,
        pushed: PushedUnits,
        unmasking: Unmasking | None = None,
        store_moments: Callable[[plan_pb2.Commit], None] = lambda commit: None,
    ) -> plan_pb2.Commit:
        """Commits the averages of the prepared states of all clusters that are not late.

        A repeated request changes nothing but the restore point.

        Args:
            pushed: Has the weights that the clusters pushed.
            unmasking: What removes the masks, if what the clusters pushed is masked.
            store_moments: Stores the optimizer states of the edge server's own units that a commit names.

        Raises:
            WrongStateError: The round is not the next one, or the attempt did not push these states.
            InvalidInputError: A cluster or a unit is missing, all clusters are late, or no cluster has samples.
            CorruptDataError: What a cluster pushed is damaged, does not fit its unit, is not finite, or is far from the weights
                before.
        """
        last, attempt = self.commit(), request.attempt
        if is_already_committed(last, attempt):
            if request.candidate_copied and last.HasField("candidate"):
                last = with_candidate_restorable(last, request)
                self._replace_commit(last)
            return last
        self.check_is_next(attempt)
        present = present_clusters(last, request)
        averages = list(pushed.averages(attempt, present, unmasking))
        units_before = began_with(last, attempt).global_units
        # The other rules bound what a wrong cluster can do. Masked changes have a bound for each weight.
        if self.averaging().rule == "mean" and unmasking is None:
            for before, average in zip(units_before, averages, strict=True):
                _check_changes(before, average, present)
        for average in averages:
            self._store.adopt(average.digest, average.path)
        self._store.sync()
        global_units = [
            plan_pb2.UnitState(
                unit_index=before.unit_index,
                weights_digest=average.digest,
                frozen_digest=before.frozen_digest,
                largest_change=max((before.largest_change, *average.changes)),
            )
            for before, average in zip(units_before, averages, strict=True)
        ]
        commit = following(last, request, global_units)
        if request.is_candidate:
            store_moments(commit)
        self._replace_commit(commit)
        return commit

    def roll_back(self, num_rounds: int, attempt: int) -> plan_pb2.Commit:
        """Makes a kept commit the last one, and returns it, as `commits.going_to` says. A repeated request changes nothing."""
        last = self.commit()
        commit = going_to(last, num_rounds, attempt)
        if commit is last:
            return last
        self._replace_commit(commit)
        return commit

    def check_is_next(self, attempt: plan_pb2.Attempt) -> None:
        """Refuses an attempt whose round is not the next one.

        The first round of a new run of the job follows the last commit or the restore point.

        Raises:
            WrongStateError: Another round is the next one.
        """
        check_is_next(self._commits.head(self._job_id), attempt)

    def export(self, directory: Path, *, merged: bool = False) -> None:
        """Writes the model and the vocabulary to a directory, as `save_pretrained` does.

        With LoRA, it writes only the adapter, unless the adapter and the pretrained model would not give the trained one.

        Args:
            merged: Whether to add LoRA to the frozen weights and write the whole model.
        """
        document = self._job_document()
        model_spec, _ = self.model_spec()
        adapter = adapter_for(model_spec.family, model_spec.task, model_spec.config_json)
        base = document.adapter_base
        if merged or base is None:
            with TensorsOnDisk(self._directory):
                model = join_model(adapter, self._states(adapter))
                model.save_pretrained(directory, max_shard_size=_SHARD_BYTES)
        else:
            save_lora(adapter, self._states(adapter), directory, base)
        vocabulary = self._store.read_checked(document.vocabulary_digest)
        write_tokenizer_files(directory, vocabulary, model_spec.family, document.max_length)

    def _states(self, adapter: ModelAdapter) -> Iterator[dict[str, Tensor]]:
        """Yields the state of each unit."""
        for index, unit in enumerate(self.commit().global_units):
            state = load_tensors(self._store.read_checked(unit.weights_digest))
            if unit.frozen_digest:
                names = adapter.frozen_names(index)
                frozen = load_tensors(self._frozen.store.read_checked(unit.frozen_digest))
                state |= {names[name]: tensor for name, tensor in frozen.items()}
            yield state

    def _job_document(self) -> JobDocument:
        return self._commits.job(self._job_id)

    def _replace_commit(self, commit: plan_pb2.Commit) -> None:
        """Stores a commit, and then deletes the blobs that it does not name."""
        self._commits.replace_commit(commit)
        units: list[plan_pb2.UnitState] = []
        for kept in (commit, commit.restore_point, commit.candidate, *commit.history):
            units.extend(kept.global_units)
            for cluster in kept.clusters:
                units.extend(cluster.units)
        keep = {digest for unit in units for digest in (unit.weights_digest, unit.optimizer_digest)}
        self._store.keep_only(keep | {self._job_document().vocabulary_digest})


def _check_changes(
    unit: plan_pb2.UnitState, average: Averaged, clusters: Sequence[plan_pb2.ClusterState]
) -> None:
    """Raises `CorruptDataError` if a cluster has changed a unit far more than any cluster did in an earlier round."""
    for cluster, change in zip(clusters, average.changes, strict=True):
        if unit.largest_change and change > _MOST_GROWTH * unit.largest_change:
            error = CorruptDataError(
                f"cluster {cluster.cluster_index} changed unit {unit.unit_index} by {change:.3g}, but no earlier round by more "
                f"than {unit.largest_change:.3g} (limit: {_MOST_GROWTH:g} times that): a device computes wrongly, or training "
                "diverged; lower training.learning_rate, or leave the device out"
            )
            error.cluster_index = cluster.cluster_index
            raise error


def _put_checked(blob: TensorBlob, store: BlobStore) -> None:
    store.put(blob.digest, blob.read(), is_checked=True)


def _adapter_base(adapter: ModelAdapter, model: ModelConfig) -> str | None:
    """Returns the directory of the pretrained model to which an adapter of the job can be added, or its name on the hub.

    `None` if there is none, or if the model with the adapter would not be the trained one.
    """
    if model.lora is None or model.pretrained is None or model.config or model.base_quantisation:
        return None
    if changes_embeddings(adapter.meta_model):
        return None
    return hub_name(model.pretrained) or str(pretrained_directory(model.pretrained).resolve())


def _directory_name(model: ModelConfig) -> str:
    """Returns the name by which hosts may have the pretrained directory, too. Empty for random weights."""
    if model.pretrained is None:
        return ""
    path = hub_name(model.pretrained) or pretrained_directory(model.pretrained).resolve()
    return Path(path).name
