"""StageService: admits sessions, fences off what is not of their attempt, and runs their commands."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from collapipe.errors import (
    CancelledError,
    CollapipeError,
    InvalidInputError,
    PeerLostError,
    WrongStateError,
)
from collapipe.rpc import Outbox, work_with_signs_of_life
from collapipe.stage_service.links import serve_upstream
from collapipe.stage_service.session import HostResources, StageSession
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc

logger = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 30.0
"""How long a new session waits for the computation of the one that it replaces to end."""


@dataclass
class _Admitted:
    session: StageSession
    ended: threading.Event


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Serves one stage of each cluster.

    Args:
        resources: Of this host.
    """

    def __init__(self, resources: HostResources) -> None:
        self._resources = resources
        self._lock = threading.Lock()
        self._admitted: dict[int, _Admitted] = {}
        self._latest: dict[int, plan_pb2.Attempt] = {}

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
        session = admitted.session
        commands: Outbox[stage_pb2.RunStageRequest] = Outbox()

        def receive() -> None:
            try:
                for request in request_iterator:
                    commands.put(request)
            except Exception:  # gRPC raises a bare Exception when the caller went away
                session.abort(CancelledError("the control unit went away"))
            commands.close()

        def work(emit: Callable[[stage_pb2.RunStageResponse], None]) -> None:
            try:
                emit(stage_pb2.RunStageResponse(configured=session.configure()))
                threading.Thread(target=receive, name="commands", daemon=True).start()
                for command in commands:
                    _execute(session, command, emit)
            except CollapipeError as error:
                logger.info("round %d aborted: %s", session.attempt.round_index, error)
                blamed = error.host_id if isinstance(error, PeerLostError) else ""
                failed = stage_pb2.StageFailed(message=str(error), blamed_host_id=blamed)
                emit(stage_pb2.RunStageResponse(failed=failed))
            finally:
                session.close()
                admitted.ended.set()

        def sign_of_life() -> stage_pb2.RunStageResponse:
            progress = stage_pb2.StageProgress(waiting_for=session.waiting_for)
            return stage_pb2.RunStageResponse(progress=progress)

        def cancel(reason: CancelledError) -> None:
            session.abort(reason)
            commands.close()

        yield from work_with_signs_of_life(work, sign_of_life, cancel, context)

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
        yield from serve_upstream(
            request_iterator, session.upstream, session.mailbox, session.meter, session.abort
        )

    def _admit(self, configure: stage_pb2.ConfigureStage) -> _Admitted:
        """Opens a session unless its attempt is an old one; a session of an older attempt ends first."""
        attempt, cluster_index = configure.attempt, configure.plan.cluster_index
        with self._lock:
            latest = self._latest.get(cluster_index)
            if (
                latest is not None
                and latest.job_id == attempt.job_id
                and _order(attempt) <= _order(latest)
            ):
                raise WrongStateError(
                    f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} is not "
                    f"newer than round {latest.round_index}, attempt {latest.attempt}, which was served already"
                )
            before = self._admitted.get(cluster_index)
            if before is not None:
                before.session.abort(WrongStateError("a newer attempt took over"))
                if not before.ended.wait(_HAND_OVER_SECONDS):
                    raise WrongStateError(
                        f"{self._resources.host_id} still computes for round "
                        f"{before.session.attempt.round_index} after {_HAND_OVER_SECONDS:g} s: try again"
                    )
            session = StageSession(configure, self._resources)
            admitted = _Admitted(session, threading.Event())
            self._latest[cluster_index] = attempt
            self._admitted[cluster_index] = admitted
            return admitted

    def _session_of(self, opening: stage_pb2.OpenLink) -> StageSession:
        with self._lock:
            admitted = self._admitted.get(opening.cluster_index)
        if (
            admitted is None
            or admitted.ended.is_set()
            or admitted.session.attempt != opening.attempt
            or admitted.session.stage_index != opening.stage_index
        ):
            raise WrongStateError(
                f"{self._resources.host_id} does not serve stage {opening.stage_index} of round "
                f"{opening.attempt.round_index}, attempt {opening.attempt.attempt}, plan {opening.attempt.plan_id}"
            )
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
