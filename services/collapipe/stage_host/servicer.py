"""StageService: admits sessions, fences off what is not of their attempt, and runs their commands."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from collapipe.errors import (
    CancelledError,
    CollapipeError,
    InvalidInputError,
    PeerLostError,
    WrongStateError,
)
from collapipe.neighbour_streams.stream import serve_upstream
from collapipe.rpc import Outbox, work_with_signs_of_life
from collapipe.stage_host.session import HostResources, StageSession
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass
class _Admitted:
    """A session and its commands, until it has ended."""

    session: StageSession
    commands: Outbox[stage_pb2.RunStageRequest] = field(default_factory=Outbox)
    ended: threading.Event = field(default_factory=threading.Event)
    stopped: CollapipeError | None = None
    is_linked: bool = False
    before: "_Admitted | None" = None

    def wait_for_turn(self) -> None:
        """Waits until the session before has ended: both would change the same units.

        That one was told to, so this takes no longer than what it computes; the caller gets signs of life meanwhile.
        """
        if self.before is not None:
            self.before.ended.wait()
            self.before = None

    def stop(self, reason: CollapipeError) -> None:
        """Makes the session end with `reason`, whether it computes, waits or idles."""
        self.stopped = self.stopped or reason
        self.session.abort(reason)
        self.commands.close()

    def end(self) -> None:
        """Closes the session, once: the next one shares its units, and so may the one before as long as it computes."""
        if not self.ended.is_set():
            self.wait_for_turn()
            self.session.close()
            self.ended.set()


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Serves one stage of each cluster.

    Args:
        resources: Of this host.
    """

    def __init__(self, resources: HostResources) -> None:
        self._resources = resources
        self._lock = threading.Lock()
        self._admitted: dict[int, _Admitted] = {}
        self._latest: dict[tuple[int, str], plan_pb2.Attempt] = {}

    def RunStage(
        self,
        request_iterator: Iterator[stage_pb2.RunStageRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.RunStageResponse]:
        """Drives one stage through one attempt."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("command") != "configure":
            raise InvalidInputError("a session begins with ConfigureStage")
        admitted = self._admit(first.configure)
        session, commands = admitted.session, admitted.commands

        def receive() -> None:
            try:
                for request in request_iterator:
                    commands.put(request)
            except Exception:  # gRPC raises a bare Exception when the caller went away
                admitted.stop(CancelledError("the control unit went away"))
            commands.close()

        def work(emit: Callable[[stage_pb2.RunStageResponse], None]) -> None:
            try:
                admitted.wait_for_turn()
                emit(stage_pb2.RunStageResponse(configured=session.configure()))
                threading.Thread(target=receive, name="commands", daemon=True).start()
                for command in commands:
                    _execute(session, command, emit)
                if admitted.stopped is not None:
                    raise admitted.stopped
            except CollapipeError as error:
                logger.info("round %d aborted: %s", session.attempt.round_index, error)
                blamed = error.host_id if isinstance(error, PeerLostError) else ""
                failed = stage_pb2.StageFailed(message=str(error), blamed_host_id=blamed)
                emit(stage_pb2.RunStageResponse(failed=failed))
            finally:
                admitted.end()

        def sign_of_life() -> stage_pb2.RunStageResponse:
            progress = stage_pb2.StageProgress(
                waiting_for=session.waiting_for, received_bytes=session.meter.received_bytes
            )
            return stage_pb2.RunStageResponse(progress=progress)

        try:
            yield from work_with_signs_of_life(work, sign_of_life, admitted.stop, context)
        finally:  # of a session whose caller was gone before it began
            admitted.end()

    def ExchangeActivations(
        self,
        request_iterator: Iterator[stage_pb2.ExchangeActivationsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        """Carries activations from the previous stage and what goes back to it."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("part") != "open":
            raise InvalidInputError("a link begins with OpenLink")
        session = self._session_of(first.open)

        def on_end() -> None:
            # beside what reading the requests tells: a call that breaks may look there like one that ends in good order
            session.abort(PeerLostError("", "the previous stage broke its link"))

        if not context.add_callback(on_end):
            on_end()
        sender, receiver = session.link_ends(session.stage_index - 1)
        yield from serve_upstream(
            request_iterator, session.upstream, sender, receiver, session.meter, session.abort
        )

    def _admit(self, configure: stage_pb2.ConfigureStage) -> _Admitted:
        """Takes a session unless its attempt is an old one, and tells the session before to end."""
        attempt, cluster_index = configure.attempt, configure.plan.cluster_index
        admitted = _Admitted(StageSession(configure, self._resources))
        with self._lock:
            latest = self._latest.get((cluster_index, attempt.job_id))
            if latest is not None and _order(attempt) <= _order(latest):
                raise WrongStateError(
                    f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} is not "
                    f"newer than round {latest.round_index}, attempt {latest.attempt}, which was served already"
                )
            admitted.before = self._admitted.get(cluster_index)
            self._latest[cluster_index, attempt.job_id] = attempt
            self._admitted[cluster_index] = admitted
        if admitted.before is not None:
            admitted.before.stop(WrongStateError("a newer attempt took over"))
        return admitted

    def _session_of(self, opening: stage_pb2.OpenLink) -> StageSession:
        with self._lock:
            admitted = self._admitted.get(opening.cluster_index)
            if (
                admitted is None
                or admitted.ended.is_set()
                or admitted.session.attempt != opening.attempt
                or admitted.session.stage_index != opening.stage_index
                or not opening.stage_index  # nothing comes before the first stage
                or admitted.is_linked
            ):
                raise WrongStateError(
                    f"{self._resources.host_id} expects no link to stage {opening.stage_index} of round "
                    f"{opening.attempt.round_index}, attempt {opening.attempt.attempt}, "
                    f"plan {opening.attempt.plan_id}"
                )
            admitted.is_linked = True
            return admitted.session


def _order(attempt: plan_pb2.Attempt) -> tuple[int, int]:
    return attempt.round_index, attempt.attempt


def _execute(
    session: StageSession,
    request: stage_pb2.RunStageRequest,
    emit: Callable[[stage_pb2.RunStageResponse], None],
) -> None:
    command = request.WhichOneof("command")
    if command == "run_step":
        emit(stage_pb2.RunStageResponse(step_done=session.run_step(request.run_step)))
    elif command == "run_evaluation":
        done = session.run_evaluation(request.run_evaluation)
        emit(stage_pb2.RunStageResponse(evaluation_done=done))
    elif command == "finish":
        emit(stage_pb2.RunStageResponse(finished=session.finish(request.finish)))
    else:
        raise InvalidInputError(f"a session cannot {command or 'do nothing'} in its middle")
