"""Prepares a job: the clusters load their data, and the edge server makes or finds the model."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from collapipe.data.cluster_rows import labels_in_order
from collapipe.data.findings import (
    Counted,
    JobFacts,
    TextFacts,
    few_held_out_rows,
    find_in_job,
    refuse_warnings,
)
from collapipe.data.hold_out import HELD_OUT_SHARE
from collapipe.data.rows import READING_VERSION
from collapipe.errors import (
    CollapipeError,
    InvalidInputError,
    PeerFaultyError,
    WrongStateError,
)
from collapipe.evaluation import first_places
from collapipe.finding import Finding, in_order, shortened
from collapipe.job import JobConfig
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.job_warnings import find_passes
from collapipe.planning.round_problem import ModelSizes
from collapipe.rpc import impossible_value
from collapipe.rpc.finding_messages import from_message, harmless
from collapipe.rpc.options import MAX_MESSAGE_BYTES
from collapipe.scheduler.host_calls import HostCalls, told_by
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import begins_anew
from collapipe.v1 import (
    control_unit_pb2,
    edge_server_pb2,
    edge_server_pb2_grpc,
    job_pb2,
    plan_pb2,
    scheduler_pb2,
)

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 3600.0
"""A control unit that only sends signs of life for longer is given up."""
_GIVE_UP_SECONDS = 2.0
_MOST = (1 << 40, 1 << 40, 1 << 16, 100)
"""Most training rows, held-out rows, labels and findings of a cluster. So many rows are far above what a control unit can hold, and sums
of many clusters fit into 64 bits. Each label adds a row of weights to the head."""


@dataclass(frozen=True)
class PreparedJob:
    """What the edge server answered about a job.

    Args:
        commit: The last commit.
        num_rows: Training rows that each cluster has loaded.
        num_held_out_rows: Rows that each cluster evaluates.
    """

    model: plan_pb2.ModelSpec
    sizes: ModelSizes
    vocabulary: job_pb2.BlobSource
    commit: plan_pb2.Commit
    num_rows: Sequence[int]
    num_held_out_rows: Sequence[int]


class JobPreparation:
    """Prepares one job, and prepares it again when hosts were restarted."""

    def __init__(self, progress: JobProgress, calls: HostCalls) -> None:
        self._progress = progress
        self._calls = calls
        self._loaded: dict[int, tuple[str, control_unit_pb2.PrepareDataResponse]] = {}
        """The process that has loaded the data of a cluster, and its answer, by cluster index."""
        self._told: dict[str, list[Finding]] = {}
        """What was published about the data, and about the pretrained weights."""
        self._unanswered: (
            tuple[edge_server_pb2_grpc.EdgeServerServiceStub, edge_server_pb2.PrepareJobRequest]
            | None
        ) = None
        """The request for the model that the edge server has not answered."""

    def give_up(self) -> None:
        """Tells the edge server that the job was cancelled, if it may still make the model. It goes on for a while after a broken connection."""
        if self._unanswered is not None:
            stub, request = self._unanswered
            request.gives_up = True
            with suppress(grpc.RpcError):
                list(stub.PrepareJob(request, timeout=_GIVE_UP_SECONDS))

    def prepare(self, hosts: JobHosts) -> PreparedJob:
        """Loads what is not loaded yet.

        Raises:
            InvalidInputError: The data or the model of the job cannot be used.
            WrongStateError: The edge server has an older commit than this scheduler has seen.
            CollapipeError: A host failed.
        """
        document, edge_server = self._progress.document, hosts.edge_server
        known = None
        if document.vocabulary_digest:
            # A resumed job keeps its labels and its vocabulary, even if its data have grown.
            known = job_pb2.BlobSource(
                digest=document.vocabulary_digest, address=edge_server.address
            )
        loaded = self._load_data(hosts, known)
        labels = document.labels if known else labels_in_order(d.labels for d in loaded)
        vocabulary = known or loaded[0].vocabulary
        findings = describe_data(self._progress.job, loaded, labels)
        if known is None:
            refuse_warnings(self._progress.job, findings)
        passes = find_passes(self._progress.job, [data.num_rows for data in loaded])
        self._tell("data", [*shortened(findings), passes])
        self._progress.set_state(scheduler_pb2.JOB_STATE_PREPARING, "making the model")
        request = edge_server_pb2.PrepareJobRequest(
            job=self._progress.spec,
            labels=labels,
            vocabulary=vocabulary,
            host_clusters=self._progress.job.host_clusters,
            owner=self._progress.document.owner,
        )
        stub = self._calls.edge_server(edge_server)
        self._unanswered = stub, request
        call = stub.PrepareJob(request, wait_for_ready=True)
        answer = self._calls.last_answer(
            call, edge_server.host_id, "make the model", self._tell_waiting
        )
        self._unanswered = None
        of_weights = [from_message(each) for each in answer.findings[: _MOST[-1]]]
        self._tell("weights", shortened(of_weights))
        self._note_commit(answer.commit, edge_server.host_id)
        document.stored_bytes = answer.stored_bytes
        document.labels, document.vocabulary_digest = list(labels), vocabulary.digest
        document.reading_version = READING_VERSION
        document.num_first_rows = [data.num_first_rows for data in loaded]
        self._progress.save()
        sizes = ModelSizes(
            answer.num_blocks,
            tuple(answer.unit_bytes),
            tuple(answer.frozen_bytes),
            answer.hidden_size,
            period=2 if self._progress.job.model.half_blocks else 1,
            frozen_memory_share=answer.frozen_memory_share,
        )
        vocabulary = job_pb2.BlobSource(digest=vocabulary.digest, address=edge_server.address)
        num_rows = [data.num_rows for data in loaded]
        held_out = [data.num_held_out_rows for data in loaded]
        return PreparedJob(answer.model, sizes, vocabulary, answer.commit, num_rows, held_out)

    def _note_commit(self, commit: plan_pb2.Commit, edge_server: str) -> None:
        """Notes the last commit in the document of the job. Raises `WrongStateError` if it is older than one before."""
        document = self._progress.document
        found, before = (commit.attempt, commit.num_rounds), document.last_commit
        if found < before:
            raise WrongStateError(
                f"the last commit of {edge_server} has {found[1]} rounds, made by attempt {found[0] + 1}, but there was one with "
                f"{before[1]} rounds, made by attempt {before[0] + 1}: start it with the state directory that it had, or start a new job"
            )
        document.last_commit = found
        document.num_rounds_committed = commit.num_rounds
        document.num_rounds_restorable = commit.restore_point.num_rounds
        if begins_anew(commit):  # The answer to a rollback may have been lost.
            document.num_rounds_reached = min(document.num_rounds_reached, commit.num_rounds)

    def _tell_waiting(self, answer: edge_server_pb2.PrepareJobResponse) -> None:
        """Says for which other job the edge server works first."""
        other = harmless(answer.waits_for_job_id)
        self._progress.say(
            f"waiting until the edge server has made or exported the model of job {other}"
            if other
            else "making the model"
        )

    def _tell(self, about: str, findings: Iterable[Finding]) -> None:
        """Publishes findings, unless they are those that were published last."""
        found = list(findings)
        if found != self._told.get(about, []):
            self._told[about] = found
            for each in found:
                self._progress.publish(
                    data_note=scheduler_pb2.DataNote(message=each.text, is_warning=each.is_warning)
                )

    def _load_data(
        self, hosts: JobHosts, vocabulary: job_pb2.BlobSource | None
    ) -> list[control_unit_pb2.PrepareDataResponse]:
        """Makes each control unit load its data, unless it has done so. Returns the answers of all."""
        units = [cluster.control_unit for cluster in hosts.clusters]
        missing = [
            index
            for index, unit in enumerate(units)
            if self._loaded.get(index, ("", None))[0] != unit.incarnation
        ]
        if missing:
            self._progress.set_state(scheduler_pb2.JOB_STATE_PREPARING, "loading data")
        if 0 in missing and not self._progress.document.num_first_rows:
            # Cluster 0 makes the vocabulary of all, and says how many rows of a shared file it has found.
            vocabulary = self._load(hosts, 0, vocabulary).vocabulary
            missing = list(range(1, len(units)))
        vocabulary = vocabulary or self._loaded[0][1].vocabulary
        self._calls.in_parallel(lambda index: self._load(hosts, index, vocabulary), missing)
        loaded = [self._loaded[index][1] for index in range(len(units))]
        if not any(data.num_held_out_rows for data in loaded):
            raise InvalidInputError(
                "data.train has a file for each cluster, but none of their rows can be held out for evaluation (the hash of the "
                "text chooses): add rows, or name a file in data.held_out"
            )
        return loaded

    def _load(
        self, hosts: JobHosts, cluster_index: int, vocabulary: job_pb2.BlobSource | None
    ) -> control_unit_pb2.PrepareDataResponse:
        unit = hosts.clusters[cluster_index].control_unit
        request = control_unit_pb2.PrepareDataRequest(
            job=self._progress.spec,
            cluster_index=cluster_index,
            vocabulary=vocabulary,
            owner=self._progress.document.owner,
            num_first_rows=self._num_first_rows(cluster_index),
            has_model=bool(self._progress.document.vocabulary_digest),
        )
        stub = self._calls.control_unit(unit)
        call = stub.PrepareData(request, wait_for_ready=True, timeout=_LOAD_SECONDS)
        try:
            data = self._calls.last_answer(call, unit.host_id, "load its data")
        except CollapipeError as error:
            raise told_by(unit.host_id, error) from None
        found = data.num_rows, data.num_held_out_rows, len(data.labels), len(data.findings)
        texts = data.texts
        is_possible = max(texts.num_special, texts.num_unknown) <= texts.num_rows <= _MOST[0]
        if any(n > most for n, most in zip(found, _MOST, strict=True)) or not is_possible:
            raise PeerFaultyError(
                unit.host_id,
                f"{unit.host_id} says that it has {found[0]} training rows, {found[1]} held-out rows, {found[2]} labels and {found[3]} "
                f"findings, but at most {', '.join(map(str, _MOST))} are possible; and of {texts.num_rows} texts, {texts.num_special} with special "
                f"tokens and {texts.num_unknown} that are unknown: look at its log",
            )
        if wrong := impossible_value(data, most_characters=MAX_MESSAGE_BYTES):
            raise PeerFaultyError(unit.host_id, f"{unit.host_id} sent {wrong}: look at its log")
        # Otherwise a control unit could make other hosts call any address.
        data.vocabulary.address = unit.address
        logger.info(
            "cluster %d has %d training rows and %d held-out rows",
            cluster_index,
            data.num_rows,
            data.num_held_out_rows,
        )
        self._loaded[cluster_index] = unit.incarnation, data
        return data

    def _num_first_rows(self, cluster_index: int) -> int:
        """Returns the rows of the cluster's file at its first reading; 0 if that is still to come.

        A shared file may grow meanwhile. So all clusters get the number of cluster 0, and choose the same held-out rows.
        """
        known = self._progress.document.num_first_rows
        is_shared = not isinstance(self._progress.job.data.train, list)
        if known:
            return known[0 if is_shared else cluster_index]
        return self._loaded[0][1].num_first_rows if is_shared and cluster_index > 0 else 0


def describe_data(
    job: JobConfig,
    loaded: Sequence[control_unit_pb2.PrepareDataResponse],
    labels: Sequence[str],
) -> list[Finding]:
    """Says what a person should know about the data of a job: warnings first, and of both kinds those about all clusters first.

    Args:
        loaded: The answer of each cluster.
        labels: The labels of the job.
    """
    places = first_places(
        (each.label, each.place) for data in loaded for each in data.held_out_labels
    )
    facts = JobFacts(
        num_train=sum(data.num_rows for data in loaded),
        num_held_out=sum(data.num_held_out_rows for data in loaded),
        labels=labels,
        held_out_places=places,
        num_long=(
            sum(data.num_long_rows for data in loaded),
            sum(data.num_long_held_out_rows for data in loaded),
        ),
        texts=[_text_facts(data.texts) for data in loaded],
    )
    if job.privacy.is_on:  # Control units tell only the numbers of rows.
        few = few_held_out_rows(job.task.kind, facts.num_held_out)
        found = [] if few is None else [few]
    else:
        found = find_in_job(job, facts, HELD_OUT_SHARE)
    of_clusters = [from_message(each) for data in loaded for each in data.findings]
    return in_order([*found, *of_clusters])


def _text_facts(counts: control_unit_pb2.TextCounts) -> TextFacts:
    return TextFacts(
        counts.num_rows,
        Counted(counts.num_special, harmless(counts.special_place)),
        harmless(counts.special_token),
        Counted(counts.num_unknown, harmless(counts.unknown_place)),
    )
