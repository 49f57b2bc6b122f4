"""A stage on another host, as the control unit drives it."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from collapipe.control_unit.stage_answers import mistake_in
from collapipe.errors import AttemptFailedError, CollapipeError, DivergedError, PeerLostError
from collapipe.printable import printable
from collapipe.rpc import ChannelPool, Outbox, details, why_unreachable, within_silence
from collapipe.tensors import Frame, encode_frame
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc

Request = stage_pb2.RunStageRequest
Response = stage_pb2.RunStageResponse

_REFUSED_SECONDS = 2.0
"""A device that refuses connections for this time has ended."""
_MOST_WAITING = 16
"""Answers of one kind that wait. A stage is at most two commands behind its control unit."""


class RemoteStage:
    """The session with one remote stage.

    Args:
        silence_seconds: A stage that sends nothing for longer is lost.
        on_failure: Called once, from another thread, when the stage fails or is lost. It must call `abort`.
    """

    def __init__(
        self,
        stage: plan_pb2.Stage,
        configure: stage_pb2.ConfigureStage,
        channels: ChannelPool,
        silence_seconds: float,
        on_failure: Callable[[CollapipeError], None],
    ) -> None:
        self.host_id = stage.host_id
        self._stage = stage
        self.failure: CollapipeError | None = None
        """The failure that this stage's own session reported."""
        self.progress = stage_pb2.StageProgress()
        """The last sign of life of the stage."""
        self._silence_seconds = silence_seconds
        self._on_failure = on_failure
        self._requests: Outbox[Request] = Outbox()
        self._events: defaultdict[str, deque[Response]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._closed = False
        self._aborted: CollapipeError | None = None
        self._task = "be configured"
        self._may_blame = {
            name for each in configure.plan.stages for name in (each.host_id, each.address)
        }
        for source in configure.sources:
            self._may_blame |= {
                *source.weights_addresses,
                *source.optimizer_addresses,
                *source.frozen_addresses,
            }
        self._requests.put(Request(configure=configure))
        self._channels, self._address = channels, stage.address
        stub = stage_pb2_grpc.StageServiceStub(channels.channel(stage.address))
        # The channel may not know yet that the device was started again.
        self._call = stub.RunStage(iter(self._requests), wait_for_ready=True)
        threading.Thread(target=self._receive, name=f"stage {self.host_id}", daemon=True).start()

    def send(self, request: Request, task: str) -> None:
        """Sends a command. An error about a silent stage names the `task`, for example "run step 3"."""
        self._task = task
        self._requests.put(request)

    def send_labels(self, labels: Frame) -> None:
        """Sends labels, which belong to the command before them."""
        header, chunks = encode_frame(labels)
        self._requests.put(Request(labels=header))
        for chunk in chunks:
            self._requests.put(Request(labels_chunk=chunk))

    def expect(self, event: str) -> Response:
        """Waits for an answer. Answers of one kind come in the order of their commands.

        Raises:
            CollapipeError: The stage failed, or the attempt was aborted.
        """
        with self._changed:
            while not self._events[event]:
                if reason := self.failure or self._aborted:
                    raise reason
                self._changed.wait()
            return self._events[event].popleft()

    def abort(self, reason: CollapipeError) -> None:
        """Makes every present and later `expect` raise."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the session. A stage that still works for it stops."""
        self._closed = True
        self._requests.close()
        if self.failure or self._aborted:
            self._call.cancel()

    def _receive(self) -> None:
        try:
            for response in within_silence(
                self._call,
                self._silence_seconds,
                self.host_id,
                lambda: self._task,
                lambda: why_unreachable(self._channels.channel(self._address), self.host_id),
                refused_seconds=_REFUSED_SECONDS,
            ):
                event = response.WhichOneof("event") or ""
                wrong = mistake_in(response, self._stage)
                if not wrong and len(self._events[event]) >= _MOST_WAITING:
                    wrong = f"more than {_MOST_WAITING} answers of the kind {event}, for which nobody has asked"
                if wrong:
                    raise PeerLostError(
                        self.host_id,
                        f"{self.host_id} sent {wrong}: look at its log, and run the same version everywhere",
                    )
                if event == "progress":
                    self.progress = response.progress
                    continue
                if event == "failed":
                    raise self._reported(response.failed)
                with self._changed:
                    # The event is newer than the last report of what the stage waits for.
                    self.progress.waiting_for = ""
                    self._events[event].append(response)
                    self._changed.notify_all()
            raise PeerLostError(
                self.host_id, f"{self.host_id} ended its session in the middle of the round"
            )
        except CollapipeError as error:
            if not self._closed:
                self.failure = error
                self._on_failure(error)

    def _reported(self, failed: stage_pb2.StageFailed) -> CollapipeError:
        """Returns the failure that the stage reports. If the stage blames a host outside of its plan and sources, it names the stage."""
        blamed, message = failed.blamed_host_id, printable(details(failed.message), keep="\n")
        if blamed and blamed not in self._may_blame:
            blamed = self.host_id
        if failed.diverged:
            return DivergedError(message, blamed)
        if blamed:
            return PeerLostError(blamed, f"{message} (reported by {self.host_id})")
        return AttemptFailedError(f"{self.host_id}: {message}")
