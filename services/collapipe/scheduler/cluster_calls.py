"""The calls that let control units run rounds."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from collapipe.errors import AttemptFailedError, DivergedError, PeerLostError
from collapipe.evaluation import ROWS
from collapipe.rpc import ChannelPool
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.kept_results import KeptResults
from collapipe.scheduler.planner import Planner
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2

_END_TRAINING_SECONDS = 10.0
_MOST_BYTES = 1 << 18
"""Largest message of a control unit about its round, without losses. A hundred units and a hundred devices need a tenth of it."""
_BYTES_OF_STEP = 32
"""What each mini-batch adds to that: its loss and its gradient norm take 16 bytes."""
_MOST_GROWTH = 100
"""How many times the rows that a cluster has loaded it may train on later, because its files may grow."""
_MOST_CHARACTERS = 1000
"""What is shown of the words of a control unit."""


class ClusterCalls:
    """The calls of one attempt. Several threads may use it, one for each cluster.

    Args:
        kept: What clusters have kept from the attempt before, with their evaluations.
        num_rows: Training rows that each cluster has loaded.
    """

    def __init__(
        self,
        progress: JobProgress,
        planner: Planner,
        channels: ChannelPool,
        calls: HostCalls,
        kept: KeptResults | None,
        num_rows: Sequence[int],
    ) -> None:
        job = progress.job
        self._progress = progress
        self._planner = planner
        self._channels = channels
        self._calls = calls
        self._num_rows = num_rows
        self._running: dict[int, Any] = {}
        """The last call of each cluster, by its index."""
        self._asked_to_end: dict[int, tuple[plan_pb2.Attempt, Any]] = {}
        """The last attempt that each cluster was asked to end early, with the call, by its index."""
        self.evaluations = kept.evaluations if kept else Evaluations(job.task.kind, job.clusters)
        self.has_copy: set[int] = set()
        """Indices of the clusters whose control units have the optimizer states of the present candidate."""

    def run(
        self,
        request: control_unit_pb2.RunRoundRequest,
        on_progress: Callable[[job_pb2.RoundProgress], None] = lambda progress: None,
    ) -> control_unit_pb2.RoundPrepared:
        """Lets a control unit run a round, publishes what it tells, and returns the result.

        Raises:
            CollapipeError: The round failed, or was ended.
        """
        index = request.plan.cluster_index
        control_unit = self._planner.hosts.clusters[index].control_unit
        channel = self._channels.channel(control_unit.address)
        stub = control_unit_pb2_grpc.ControlUnitServiceStub(channel)
        call = self._running[index] = stub.RunRound(request, wait_for_ready=True)
        prepared = None
        for response in self._answers(call, request):
            event = response.WhichOneof("event")
            if event == "progress":
                # A control unit speaks for its own cluster only.
                response.progress.cluster_index = index
                response.progress.waiting_for = response.progress.waiting_for[:_MOST_CHARACTERS]
                if response.progress.candidate_copied:
                    self.has_copy.add(index)
                on_progress(response.progress)
                self._progress.publish(progress=response.progress)
            elif event == "evaluation":
                try:
                    evaluation = self.evaluations.add(
                        index, response.evaluation, request.attempt.round_index
                    )
                except (LookupError, ArithmeticError, ValueError) as error:
                    raise PeerLostError(
                        control_unit.host_id,
                        f"the metric cannot be computed from the counts of {control_unit.host_id} and the other control units ({error!r}): look "
                        f"at the log of {control_unit.host_id}",
                    ) from error
                if evaluation is not None:
                    self._progress.evaluated(evaluation)
            elif event == "prepared":
                prepared = response.prepared
                if prepared.candidate_copied:
                    self.has_copy.add(index)
        if prepared is None:
            raise AttemptFailedError(f"{control_unit.host_id} ended its round without a result")
        return prepared

    def _answers(
        self, call: Any, request: control_unit_pb2.RunRoundRequest
    ) -> Iterator[control_unit_pb2.RunRoundResponse]:
        """Yields what a control unit tells of its round.

        Raises:
            PeerLostError: The control unit sent an impossible value, or blames a host outside of its round. The error then names the
                control unit.
        """
        hosts = self._planner.hosts
        index = request.plan.cluster_index
        cluster, num_rows = hosts.clusters[index], self._num_rows[index]
        control_unit = cluster.control_unit.host_id
        near = [cluster.control_unit, *cluster.devices, hosts.edge_server]
        known = {name for host in near for name in (host.host_id, host.address)}
        known |= {name for s in request.previous_stages for name in (s.host_id, s.address)}
        most_bytes = _MOST_BYTES + _BYTES_OF_STEP * request.local_steps
        try:
            for response in self._calls.answers(call, control_unit, "run its round"):
                sums, weight = response.evaluation.sums, response.prepared.state.num_samples
                if response.ByteSize() > most_bytes:
                    wrong = (
                        f"a message of {response.ByteSize()} bytes, over the limit of {most_bytes}"
                    )
                elif not all(map(math.isfinite, sums.values())) or sums.get(ROWS, 0.0) < 0:
                    wrong = f"the counts {dict(sums)}, which must be finite, with a number of rows of at least 0"
                elif weight > _MOST_GROWTH * max(num_rows, 1):
                    wrong = f"{weight} training rows, but it has loaded {num_rows}, and may have {_MOST_GROWTH} times as many"
                else:
                    yield response
                    continue
                raise PeerLostError(control_unit, f"{control_unit} sent {wrong}: look at its log")
        except (PeerLostError, DivergedError) as error:
            if error.host_id and error.host_id not in known:
                raise PeerLostError(
                    control_unit,
                    f"{control_unit} blames {error.host_id}, which has no part in the round of its cluster: {error}",
                ) from None
            raise

    def end_training(self, clusters: Iterable[int], attempt: plan_pb2.Attempt) -> None:
        """Asks control units to train no further mini-batches. Asks again, when called again, if a control unit did not know
        the attempt yet."""
        for index in clusters:
            asked = self._asked_to_end.get(index)
            if asked and asked[0] == attempt and not (asked[1].done() and asked[1].exception()):
                continue
            control_unit = self._planner.hosts.clusters[index].control_unit
            channel = self._channels.channel(control_unit.address)
            stub = control_unit_pb2_grpc.ControlUnitServiceStub(channel)
            request = control_unit_pb2.EndTrainingRequest(attempt=attempt)
            call = stub.EndTraining.future(request, timeout=_END_TRAINING_SECONDS)
            self._asked_to_end[index] = attempt, call

    def stop(self, clusters: Iterable[int]) -> None:
        """Ends the calls of clusters, as far as they have begun."""
        for index in clusters:
            if (call := self._running.get(index)) is not None:
                call.cancel()
