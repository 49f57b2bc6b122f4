"""The calls that let control units run rounds."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    DivergedError,
    InfeasibleError,
    InvalidInputError,
    NotPermittedError,
    PeerFaultyError,
    PeerLostError,
)
from collapipe.rpc.finding_messages import harmless
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.host_calls import told_by
from collapipe.scheduler.round_answers import mistake_in
from collapipe.scheduler.round_progress import RoundProgress, limit_seconds
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2

_END_TRAINING_SECONDS = 10.0


class ClusterCalls:
    """The calls of one attempt. Several threads may use it, one for each cluster.

    Args:
        evaluations: Takes what clusters count.
    """

    def __init__(self, tools: AttemptTools, evaluations: Evaluations) -> None:
        self._tools = tools
        self._progress = tools.progress
        self._calls = tools.calls
        self._running: dict[int, Any] = {}
        """The last call of each cluster, by its index."""
        self._asked_to_end: dict[int, tuple[plan_pb2.Attempt, Any]] = {}
        """The last attempt that each cluster was asked to end early, with the call, by its index."""
        self._evaluations = evaluations

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
        control_unit = self._tools.control_unit(index)
        stub = self._calls.control_unit(control_unit)
        call = self._running[index] = stub.RunRound(request, wait_for_ready=True)
        prepared = None
        for response in self._answers(call, request):
            event = response.WhichOneof("event")
            if event == "progress":
                # A control unit speaks for its own cluster only.
                response.progress.cluster_index = index
                response.progress.waiting_for = harmless(response.progress.waiting_for)
                on_progress(response.progress)
                self._progress.publish(progress=response.progress)
            elif event == "evaluation":
                self.count(index, response.evaluation, request.attempt.round_index)
            elif event == "prepared":
                prepared = response.prepared
        if prepared is None:
            raise PeerFaultyError(
                control_unit.host_id, f"{control_unit.host_id} ended its round without a result"
            )
        return prepared

    def count(self, index: int, counted: job_pb2.EvaluationSums, num_rounds: int) -> None:
        """Takes what a cluster has counted, and publishes the evaluation if all clusters have. A cluster that fails counts nothing.

        Args:
            num_rounds: Committed rounds of the evaluated model.
        """
        evaluation = self._evaluations.add(index, counted, num_rounds)
        if evaluation is not None:
            self._progress.evaluated(evaluation)

    def _answers(
        self, call: Any, request: control_unit_pb2.RunRoundRequest
    ) -> Iterator[control_unit_pb2.RunRoundResponse]:
        """Yields what a control unit tells of its round.

        Raises:
            PeerFaultyError: The control unit sent what cannot be true, blames a host outside of its round, refused the round, or makes
                no progress.
            CollapipeError: Another error, whose text then names the control unit.
        """
        hosts, prepared = self._tools.hosts, self._tools.prepared
        index = request.plan.cluster_index
        cluster = hosts.clusters[index]
        control_unit = cluster.control_unit.host_id
        near = [cluster.control_unit, *cluster.devices, hosts.edge_server]
        known = {name for host in near for name in (host.host_id, host.address)}
        known |= {name for s in request.previous_stages for name in (s.host_id, s.address)}
        job, sizes = self._tools.job, prepared.sizes
        progress = RoundProgress(
            request,
            limit_seconds(job.schedule.silence_seconds, request.predicted_step_seconds),
            sum(sizes.unit_bytes),
            sum(sizes.frozen_bytes),
            prepared.num_held_out_rows[index],
        )
        try:
            for response in self._calls.answers(call, control_unit, "run its round"):
                wrong = mistake_in(response, request, job.task.kind, prepared.num_rows[index])
                if wrong:
                    raise PeerFaultyError(
                        control_unit, f"{control_unit} sent {wrong}: look at its log"
                    )
                if progress.take(response):
                    told = harmless(response.progress.waiting_for) or "nothing"
                    raise PeerFaultyError(
                        control_unit,
                        f"{control_unit} has sent signs of life for {progress.limit_seconds:.0f} s without progress (it waits for: {told}): "
                        "look at its log, and restart it",
                    )
                yield response
        except PeerFaultyError:
            raise
        except CancelledError as error:
            if self._calls.is_ending:
                raise
            raise AttemptFailedError(f"{control_unit} ended its call: {error}") from error
        except (InvalidInputError, InfeasibleError, NotPermittedError) as error:
            raise PeerFaultyError(
                control_unit, f"{control_unit} refused its round: {error}", refuses=True
            ) from error
        except CollapipeError as error:
            blames = isinstance(error, (PeerLostError, DivergedError)) and error.host_id
            if blames and blames not in known:
                raise PeerFaultyError(
                    control_unit,
                    f"{control_unit} blames {blames}, which has no part in the round of its cluster: {error}",
                ) from None
            raise told_by(control_unit, error) from None
        finally:
            call.cancel()

    def end_training(self, clusters: Iterable[int], attempt: plan_pb2.Attempt) -> None:
        """Asks control units to train no further mini-batches. Asks again, when called again, if a control unit did not know
        the attempt yet."""
        for index in clusters:
            asked = self._asked_to_end.get(index)
            if asked and asked[0] == attempt and not (asked[1].done() and asked[1].exception()):
                continue
            stub = self._calls.control_unit(self._tools.control_unit(index))
            request = control_unit_pb2.EndTrainingRequest(attempt=attempt)
            call = stub.EndTraining.future(request, timeout=_END_TRAINING_SECONDS)
            self._asked_to_end[index] = attempt, call

    def stop(self, clusters: Iterable[int]) -> None:
        """Ends the calls of clusters, as far as they have begun."""
        for index in clusters:
            if (call := self._running.get(index)) is not None:
                call.cancel()
