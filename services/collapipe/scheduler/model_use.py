"""Uses the model of a job: it takes its turn in the queue of the jobs, and asks the control unit of the job's cluster 0."""

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from collapipe.errors import AttemptFailedError, InfeasibleError, NotFoundError, PeerLostError
from collapipe.planning.job_hosts import JobHosts
from collapipe.rpc import SIGN_OF_LIFE_SECONDS, ChannelPool, grant_of, sign_grant
from collapipe.rpc.finding_messages import harmless
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.host_choice import choose_hosts
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.plan_messages import equal_plan, with_addresses
from collapipe.v1 import (
    control_unit_pb2,
    edge_server_pb2,
    job_pb2,
    model_use_pb2,
    plan_pb2,
    scheduler_pb2,
)

Outputs = Iterator[model_use_pb2.ModelOutput]

_FIRST_WAIT_SECONDS = 0.1
"""Time before a use says that it waits for its turn. If nothing runs, its turn comes sooner."""

_CLIENT_SILENCE_SECONDS = 60.0
"""Longest time that a client may leave an answer untaken, or a file unsent, while others wait for their turn."""

_LATE_HOST_SECONDS = 15.0
"""How long a use waits for hosts of its plan that have not registered yet, because the scheduler has just started."""


class ModelUse:
    """One use of a model. One thread gives it its turn, and another one takes its outputs.

    Args:
        chunks: The bytes of the files to evaluate.
    """

    def __init__(
        self,
        start: scheduler_pb2.UseModelStart,
        chunks: Iterator[bytes],
        registry: HostRegistry,
        jobs: JobStore,
        channels: ChannelPool,
    ) -> None:
        self.job_id = start.job_id
        self._use = start.use
        self._chunks = chunks
        self._registry = registry
        self._jobs = jobs
        job = jobs.get(start.job_id).job
        self.host_clusters = frozenset(job.host_clusters[:1])
        """The clusters of the deployment that nobody else uses meanwhile."""
        self._calls = HostCalls(channels, job.schedule.silence_seconds)
        self._has_turn = threading.Event()
        self._ended = threading.Event()
        self._client_tasks: dict[str, float | None] = {
            "take an answer": None,
            "send its file": None,
        }
        """Since when the use waits for its client to do this; `None` if it does not wait."""

    @property
    def description(self) -> str:
        """What others wait for, in words."""
        return f"a use of the model of job {self.job_id} to end"

    def run(self) -> None:
        """Gives the use its turn, and waits until it has ended. Ends it if its client holds it up for too long."""
        self._jobs.grants.begin_attempt(self.host_clusters)
        self._has_turn.set()
        while not self._ended.wait(SIGN_OF_LIFE_SECONDS):
            for task, since in self._client_tasks.items():
                if since is not None and time.monotonic() - since > _CLIENT_SILENCE_SECONDS:
                    self.cancel(
                        f"the client did not {task} for {_CLIENT_SILENCE_SECONDS:g} s: use the model again, and do not "
                        "stop the client meanwhile"
                    )
                    self.give_up_turn()

    def cancel(self, reason: str) -> None:
        """Ends the use. It keeps its turn until `outputs` has ended, so that nothing runs beside its last call."""
        self._calls.cancel(reason)

    def give_up_turn(self) -> None:
        """Ends the turn even if nobody takes the outputs any more."""
        self._ended.set()

    def outputs(self, waiting_for: Callable[[], str]) -> Outputs:
        """Waits for the turn, and yields the outputs.

        Args:
            waiting_for: Returns what has its turn before, in words.

        Raises:
            CollapipeError: The use failed or was cancelled.
        """
        try:
            limit = _FIRST_WAIT_SECONDS
            while not self._has_turn.wait(limit):
                self._calls.sleep()
                yield _waiting(waiting_for())
                limit = SIGN_OF_LIFE_SECONDS
            for output in self._run():
                with self._client_has_to("take an answer"):
                    yield output
        except PeerLostError as error:
            raise PeerLostError(error.host_id, self._registry.explain(error)) from error
        finally:
            self._ended.set()

    def _run(self) -> Outputs:
        document = self._jobs.get(self.job_id)
        if not document.vocabulary_digest:
            raise NotFoundError(
                f"job {self.job_id} has no model yet, because it ended before its model was made: run or resume it"
            )
        hosts = yield from self._wait_for_hosts(document)
        prepared = yield from self._find_model(document, hosts)
        request = self._round(document, hosts, prepared)
        start = control_unit_pb2.RunModelStart(round=request, use=self._use)
        requests = itertools.chain(
            [control_unit_pb2.RunModelRequest(start=start)],
            (control_unit_pb2.RunModelRequest(chunk=chunk) for chunk in self._sent_chunks()),
        )
        control_unit = hosts.clusters[0].control_unit
        call = self._calls.control_unit(control_unit).RunModel(requests, wait_for_ready=True)
        for response in self._calls.answers(call, control_unit.host_id, "use the model"):
            output = response.output
            if output.HasField("waiting_for"):
                output.waiting_for = harmless(output.waiting_for)
            yield output

    def _sent_chunks(self) -> Iterator[bytes]:
        while True:
            with self._client_has_to("send its file"):
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            yield chunk

    @contextmanager
    def _client_has_to(self, task: str) -> Iterator[None]:
        self._client_tasks[task] = time.monotonic()
        try:
            yield
        finally:
            self._client_tasks[task] = None

    def _wait_for_hosts(
        self, document: JobDocument
    ) -> Generator[model_use_pb2.ModelOutput, None, JobHosts]:
        """Waits for the edge server, the control unit and a device of cluster 0, and returns all that are there.

        Waits a moment for the other hosts of the last plan, too, unless they have registered and are gone again.
        """
        one = {"clusters": 1, "devices_per_cluster": None, "use_clusters": [*self.host_clusters]}
        wanted = document.job.model_copy(update=one)
        limit = document.job.schedule.wait_for_hosts_seconds
        plans = self._recorded_plans(document.num_rounds_committed)
        planned = {stage.host_id for plan in itertools.islice(plans, 1) for stage in plan.stages}
        started = time.monotonic()
        while True:
            hosts, gaps = choose_hosts(self._registry.alive(), wanted)
            missing = [gap.text for gap in gaps]
            waited = time.monotonic() - started
            if hosts is not None:
                late = planned - {status.host.host_id for status in self._registry.statuses()}
                if not late or waited > _LATE_HOST_SECONDS:
                    return hosts
                missing = sorted(late)
            elif waited > limit:
                raise InfeasibleError(
                    f"the model needs {', '.join(missing)}, and has waited for {limit:g} s "
                    "(schedule.wait_for_hosts_seconds): start them (`collapipe up` does so on a local testbed)"
                )
            yield _waiting(", ".join(missing))
            self._calls.sleep(SIGN_OF_LIFE_SECONDS)

    def _find_model(
        self, document: JobDocument, hosts: JobHosts
    ) -> Generator[model_use_pb2.ModelOutput, None, edge_server_pb2.PrepareJobResponse]:
        """Returns what the edge server knows of the model at its last commit."""
        edge_server = hosts.edge_server
        request = edge_server_pb2.PrepareJobRequest(
            job=job_pb2.JobSpec(job_id=self.job_id, config_json=document.config_json),
            labels=document.labels,
            vocabulary=_vocabulary(document, hosts),
            owner=document.owner,
        )
        call = self._calls.edge_server(edge_server).PrepareJob(request, wait_for_ready=True)
        for answer in self._calls.answers(call, edge_server.host_id, "find the model"):
            if answer.HasField("commit"):
                return answer
            yield _waiting(f"{edge_server.host_id} to find the model")
        raise AttemptFailedError(f"{edge_server.host_id} did not find the model of {self.job_id}")

    def _round(
        self,
        document: JobDocument,
        hosts: JobHosts,
        prepared: edge_server_pb2.PrepareJobResponse,
    ) -> control_unit_pb2.RunRoundRequest:
        """Describes the model as the base of a round that trains nothing."""
        num_rounds = prepared.commit.num_rounds
        plan = self._plan(document, hosts, prepared)
        base = plan_pb2.ClusterState()
        base.CopyFrom(prepared.commit.clusters[0])
        for unit in base.units:
            unit.optimizer_digest = ""
        attempt = plan_pb2.Attempt(
            job_id=self.job_id,
            round_index=num_rounds,
            attempt=self._jobs.begin_use(self.job_id),
            plan_id=plan.plan_id,
        )
        request = control_unit_pb2.RunRoundRequest(
            attempt=attempt,
            job=job_pb2.JobSpec(job_id=self.job_id, config_json=document.config_json),
            model=prepared.model,
            plan=plan,
            base=base,
            labels=document.labels,
            edge_address=hosts.edge_server.address,
            edge_host_id=hosts.edge_server.host_id,
            vocabulary=_vocabulary(document, hosts),
            total_steps=document.job.total_steps,
            is_use=True,
        )
        grant = grant_of(request, document.job, self._jobs.grants.next())
        request.grant.CopyFrom(sign_grant(self._calls.channels.security, grant))
        return request

    def _plan(
        self,
        document: JobDocument,
        hosts: JobHosts,
        prepared: edge_server_pb2.PrepareJobResponse,
    ) -> plan_pb2.Plan:
        """Returns the plan of the last round, or equal segments if one of its hosts is gone."""
        addresses = {host_id: host.address for host_id, host in hosts.by_id.items()}
        for plan in self._recorded_plans(prepared.commit.num_rounds):
            if {stage.host_id for stage in plan.stages} <= addresses.keys():
                return with_addresses(plan, addresses)
        num_devices = document.job.num_devices(0)
        return equal_plan(
            hosts, num_devices, prepared.num_blocks, document.job.schedule.num_micro_batches
        )

    def _recorded_plans(self, num_rounds: int) -> Iterator[plan_pb2.Plan]:
        """Yields the last plans of cluster 0, the newest first. The evaluation of the last commit is a round, too."""
        for round_index in (num_rounds, num_rounds - 1):
            recorded = self._jobs.find_round(self.job_id, round_index) if round_index >= 0 else None
            if recorded is not None:
                yield recorded.plans[0]


def _vocabulary(document: JobDocument, hosts: JobHosts) -> job_pb2.BlobSource:
    return job_pb2.BlobSource(digest=document.vocabulary_digest, address=hosts.edge_server.address)


def _waiting(reason: str) -> model_use_pb2.ModelOutput:
    return model_use_pb2.ModelOutput(waiting_for=reason)
