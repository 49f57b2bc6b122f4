"""StageService: admits one session of each cluster of the deployment at a time, and runs its commands.

A session or a stream of an older attempt is refused.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from collapipe.attempts import order
from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    DivergedError,
    InvalidInputError,
    PeerLostError,
    WrongStateError,
)
from collapipe.rpc import (
    Outbox,
    check_finish,
    check_session,
    check_stage_caller,
    explain_unexpected,
    work_with_signs_of_life,
)
from collapipe.stage_host.command_limits import mistake_in
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_host.session import StageSession
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc

logger = logging.getLogger(__name__)

_TURN_SECONDS = 600.0
"""How long a session waits for the end of the previous one, which ends after one computation."""

MOST_KEPT_ATTEMPTS = 4096
"""How many latest attempts are remembered. If one is forgotten, an older attempt is still refused, because its grant has ended."""

_MOST_COMMANDS = 16
"""A control unit is at most one step ahead of its stages."""

Emit = Callable[[stage_pb2.RunStageResponse], None]


@dataclass
class _AdmittedSession:
    """A session in the order of admission, with its commands."""

    session: StageSession
    predecessor: "_AdmittedSession | None" = None
    commands: Outbox[stage_pb2.RunStageRequest] = field(default_factory=Outbox)
    ended: threading.Event = field(default_factory=threading.Event)
    stop_reason: CollapipeError | None = None
    has_upstream: bool = False
    """Whether the previous stage has opened its stream."""

    def wait_for_turn(self, host_id: str) -> None:
        """Waits until all previous sessions have ended, because all change the same units.

        They were stopped, so this takes no longer than one computation, or one chunk of a transfer.

        Raises:
            PeerLostError: It takes too long.
        """
        until = time.monotonic() + _TURN_SECONDS
        while (before := self.predecessor) is not None:
            if not before.ended.wait(until - time.monotonic()):
                raise PeerLostError(
                    host_id,
                    f"{host_id} still computes for the attempt before, {_TURN_SECONDS:.0f} s after it was stopped: restart {host_id}",
                )
            # A session that ended before its turn leaves its own predecessor, which may still run.
            self.predecessor = before.predecessor

    def stop(self, reason: CollapipeError) -> None:
        """Makes the session end with `reason`, whatever it is doing."""
        self.stop_reason = self.stop_reason or reason
        self.session.abort(reason)
        self.commands.close()

    def end(self) -> None:
        """Closes the session, once. It need not wait for its turn, because a session gets its units only then."""
        if not self.ended.is_set():
            self.session.close()
            self.ended.set()


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Serves one stage of each cluster."""

    def __init__(self, resources: HostResources) -> None:
        self._resources = resources
        self._lock = threading.Lock()
        self._admitted: dict[int, _AdmittedSession] = {}
        """By the cluster of the deployment."""
        self._latest: dict[tuple[int, str], plan_pb2.Attempt] = {}

    def RunStage(
        self,
        request_iterator: Iterator[stage_pb2.RunStageRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.RunStageResponse]:
        """Runs the commands for one stage in one attempt."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("command") != "configure":
            raise InvalidInputError("a session begins with ConfigureStage")
        resources = self._resources
        security, host_id = resources.channels.security, resources.host_id
        grant = check_session(security, context, first.configure, host_id)
        admitted = self._admit(first.configure)
        session = admitted.session

        def receive_commands() -> None:
            try:
                for request in request_iterator:
                    # The stage waits for labels while it runs the command before them.
                    match request.WhichOneof("command"):
                        case "labels":
                            session.take_labels(request.labels)
                        case "labels_chunk":
                            session.take_labels(request.labels_chunk)
                        case _ if len(admitted.commands) < _MOST_COMMANDS:
                            admitted.commands.put(request)
                        case _:
                            raise InvalidInputError(
                                f"a control unit may have {_MOST_COMMANDS} commands wait: run the same version everywhere"
                            )
            except CollapipeError as error:
                admitted.stop(error)
            except Exception as error:  # gRPC raises an RpcError when the caller goes away.
                if context.is_active():
                    logger.exception("receiving commands failed unexpectedly")
                    admitted.stop(AttemptFailedError(explain_unexpected(error)))
                else:
                    admitted.stop(CancelledError("the control unit went away"))
            admitted.commands.close()

        def work(emit: Emit) -> None:
            try:
                admitted.wait_for_turn(host_id)
                emit(stage_pb2.RunStageResponse(configured=session.configure()))
                threading.Thread(target=receive_commands, name="commands", daemon=True).start()
                for command in admitted.commands:
                    if grant is not None and command.WhichOneof("command") == "finish":
                        check_finish(grant, command.finish)
                    emit(_execute(session, command))
                if admitted.stop_reason is not None:
                    raise admitted.stop_reason
            except CollapipeError as error:
                logger.info("round %d aborted: %s", session.attempt.round_index, error)
                failed = stage_pb2.StageFailed(message=str(error))
                if isinstance(error, (PeerLostError, DivergedError)):
                    failed.blamed_host_id = error.host_id
                    failed.diverged = isinstance(error, DivergedError)
                emit(stage_pb2.RunStageResponse(failed=failed))
            finally:
                admitted.end()

        def sign_of_life() -> stage_pb2.RunStageResponse:
            progress = stage_pb2.StageProgress(
                waiting_for=session.waiting_for,
                received_bytes=session.received_bytes,
                moved_bytes=session.moved_bytes,
                is_idle=session.is_idle,
            )
            return stage_pb2.RunStageResponse(progress=progress)

        with self._resources.using(session.attempt.job_id):
            try:
                yield from work_with_signs_of_life(work, sign_of_life, admitted.stop, context)
            finally:  # If the caller left before the work began, `work` has not ended the session.
                admitted.end()

    def ExchangeActivations(
        self,
        request_iterator: Iterator[stage_pb2.ExchangeActivationsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        """Carries activations from the previous stage, and activation gradients back to it."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("part") != "open":
            raise InvalidInputError("a stream between stages begins with OpenLink")
        session = self._session_of(first.open, context)

        def on_end() -> None:
            # To the thread that reads requests, a broken call may look like one that ends in good order.
            reason = f"the previous stage broke its stream to stage {session.stage_index}"
            session.lose_stream(PeerLostError("", reason))

        if not context.add_callback(on_end):
            on_end()
        yield from session.serve_previous_stage(request_iterator)

    def _admit(self, configure: stage_pb2.ConfigureStage) -> _AdmittedSession:
        """Admits a session of a newer attempt, and stops the previous session of the cluster."""
        attempt, cluster_index = configure.attempt, configure.plan.cluster_index
        admitted = _AdmittedSession(StageSession(configure, self._resources))
        with self._lock:
            latest = self._latest.get((cluster_index, attempt.job_id))
            if latest is not None and order(attempt) <= order(latest):
                raise WrongStateError(
                    f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} is not "
                    f"newer than round {latest.round_index}, attempt {latest.attempt}, which was served already"
                )
            predecessor = admitted.predecessor = self._admitted.get(configure.host_cluster)
            self._latest.pop((cluster_index, attempt.job_id), None)  # It becomes the newest one.
            self._latest[cluster_index, attempt.job_id] = attempt
            if len(self._latest) > MOST_KEPT_ATTEMPTS:
                del self._latest[next(iter(self._latest))]
            self._admitted[configure.host_cluster] = admitted
        if predecessor is not None:
            name = (
                f"attempt {attempt.attempt} of round {attempt.round_index} of job {attempt.job_id}"
            )
            predecessor.stop(WrongStateError(f"{name} took over"))
        return admitted

    def _session_of(
        self, opening: stage_pb2.OpenLink, context: grpc.ServicerContext
    ) -> StageSession:
        """Returns the session for a stream of the previous stage. Refuses a second stream, and one of another host."""
        with self._lock:
            wanted = opening.attempt, opening.cluster_index, opening.stage_index
            sessions = ((a.session, a) for a in self._admitted.values())
            admitted = next(
                (a for s, a in sessions if (s.attempt, s.cluster_index, s.stage_index) == wanted),
                None,
            )
            if admitted is not None and opening.stage_index:
                check_stage_caller(context, admitted.session.plan, opening.stage_index - 1)
            if (
                admitted is None
                or admitted.ended.is_set()
                or opening.stage_index == 0  # The first stage has no previous stage.
                or not admitted.session.is_configured  # The stage before waits until all stages are.
                or admitted.has_upstream
            ):
                raise WrongStateError(
                    f"{self._resources.host_id} expects no stream to stage {opening.stage_index} of round "
                    f"{opening.attempt.round_index}, attempt {opening.attempt.attempt}, "
                    f"plan {opening.attempt.plan_id}"
                )
            admitted.has_upstream = True
            return admitted.session


def _execute(
    session: StageSession, request: stage_pb2.RunStageRequest
) -> stage_pb2.RunStageResponse:
    command = request.WhichOneof("command")
    if wrong := mistake_in(request, session.plan):
        raise InvalidInputError(
            f"stage {session.stage_index} was given {wrong}: run the same version everywhere"
        )
    if command == "run_step":
        return stage_pb2.RunStageResponse(step_done=session.run_step(request.run_step))
    if command == "run_evaluation":
        done = session.run_evaluation(request.run_evaluation)
        return stage_pb2.RunStageResponse(evaluation_done=done)
    if command == "run_generation":
        generated = session.run_generation(request.run_generation)
        return stage_pb2.RunStageResponse(generation_done=generated)
    if command == "finish":
        return stage_pb2.RunStageResponse(finished=session.finish(request.finish))
    raise InvalidInputError(
        f"a session that has begun takes no command {command or 'without a name'}: "
        "it takes run_step, run_evaluation, run_generation and finish"
    )
