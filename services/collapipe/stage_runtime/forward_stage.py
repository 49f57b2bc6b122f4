"""Runs one stage of a pipeline forward only: evaluations and generations. `stage.py` adds training."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from collapipe.errors import PeerLostError, WrongStateError
from collapipe.models import GenerationSettings, Head
from collapipe.stage_runtime.action_order import Progress
from collapipe.stage_runtime.compute_device import Report, Timing
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.stage_runtime.resident_units import ResidentUnit
from collapipe.stage_runtime.sequences import Sequences, TokenSequence
from collapipe.stage_runtime.stage_context import StageContext, StepTimes
from collapipe.stage_runtime.stage_metrics import StageMetrics
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import ACTIVATION, LABELS, Frame, FrameKind
from collapipe.work_shares import FORWARD_SHARE

_IDLE = "get the next command"


@dataclass(kw_only=True)
class Step:
    """The progress of this stage through the micro-batches of a mini-batch or of an evaluation."""

    index: int
    progress: Progress
    frames_to_head: FrameKind
    """Kind of the frames that come from the previous stage."""
    frames_to_embedding: FrameKind
    """Kind of the frames that come from the next stage."""
    has_labels: bool
    """Whether the control unit sends labels to the stage with the head."""
    times: StepTimes = field(default_factory=StepTimes)


class ForwardStage:
    """A contiguous range of units between two neighbours.

    Args:
        units: The units, in order. A stage without units passes every frame on.
        send_forward: Sends a frame to the next stage. The stage with the head never calls it.
        send_backward: Sends a frame to the previous stage.
        processor: The processor to imitate; `None` for none.
    """

    def __init__(
        self,
        context: StageContext,
        units: Sequence[ResidentUnit],
        mailbox: Mailbox,
        send_forward: Callable[[Frame], None],
        send_backward: Callable[[Frame], None],
        metrics: StageMetrics,
        processor: EmulatedProcessor | None = None,
    ) -> None:
        self._context = context
        self._units = units
        self._mailbox = mailbox
        self._send_forward = send_forward
        self._send_backward = send_backward
        self._metrics = metrics
        self._queue = context.device.queue()
        self._processor = processor if units else None  # a stage without units computes nothing
        modules = [unit.module for unit in units]
        last = modules[-1] if modules else None
        self._head = last if isinstance(last, Head) else None
        self._modules = modules[:-1] if self._head is not None else modules
        self._has_embedding = bool(units) and units[0].unit_index == 0
        self._work = StageWork(modules, context.adapter.attention_size)
        self._track = f"compute for cluster {context.host_cluster}"
        """The track of this stage in a trace. The edge server has a stage for each cluster."""
        self.waiting_for = _IDLE
        """Completes the sentence "The stage waits to ...". Empty while the stage computes."""
        self._idle_since: float | None = time.perf_counter()
        """When the stage began to wait for a command; `None` while it runs one."""

    @property
    def is_idle(self) -> bool:
        """Whether the stage waits for a command."""
        return self._idle_since is not None

    def run_evaluation(self, num_micro_batches: int, *, has_labels: bool) -> None:
        """Runs micro-batches forward only. The predictions travel back through all stages to the first.

        Args:
            has_labels: Whether the control unit sends labels to the stage with the head.
        """
        self._begin_command()
        for unit in self._units:
            unit.module.eval()
        progress = Progress(num_micro_batches, self._context.in_flight)
        step = Step(
            index=0,
            progress=progress,
            frames_to_head=FrameKind.EVALUATE,
            frames_to_embedding=FrameKind.PREDICTION,
            has_labels=has_labels,
        )
        under_way = deque[torch.Size]()
        while not progress.done:
            frame = self._take(step)
            if frame.kind is FrameKind.PREDICTION:
                self._check_predictions(frame, under_way.popleft())
            else:
                under_way.append(_inputs(frame.tensors).shape[:2])
                frame = self._evaluate(frame)  # predictions, at the head
                progress.ran_forward()
            if frame.kind is FrameKind.EVALUATE:
                self._send_forward(frame)
            else:
                self._send_backward(frame)
                progress.ran_backward()
                progress.released_one()
        self._queue.settle()
        self._end_command()

    def run_generation(self, num_sequences: int, settings: GenerationSettings) -> None:
        """Runs passes over sequences until a frame ends the generation. Tokens travel back to the first stage.

        Args:
            num_sequences: The most sequences whose keys and values are in memory.
        """
        self._begin_command()
        for unit in self._units:
            unit.module.eval()
        sequences = Sequences(num_sequences, settings)
        while (frame := self._take_any()).kind is not FrameKind.END_GENERATION:
            if frame.kind is FrameKind.PREDICTION:
                self._send_backward(frame)
            elif frame.kind is not FrameKind.GENERATE:
                raise WrongStateError(
                    f"stage {self._context.stage_index} got {frame.kind.name} while it generates"
                )
            elif self._units:
                self._generate(sequences.of_pass(frame), frame)
                self._queue.settle()  # A generation may be long, and its times must not pile up.
            else:
                self._send_forward(frame)
        if self._head is None:
            self._send_forward(frame)
        self._context.adapter.forget_pass()
        self._end_command()

    def _begin_command(self) -> None:
        # Torch tells a new thread its number of threads at the first call that asks for it, and a product of matrices asks too
        # late. With another number, a small product has other bits.
        torch.get_num_threads()
        self.waiting_for = ""
        if self._idle_since is not None:
            SPANS.record(self._track, "wait for a command", self._idle_since)
            self._idle_since = None

    def _end_command(self) -> None:
        self.waiting_for, self._idle_since = _IDLE, time.perf_counter()

    def _take(self, step: Step) -> Frame:
        progress = step.progress
        wanted = [
            (kind.name.lower(), place)
            for kind, place, may_run in (
                (step.frames_to_embedding, progress.next_backward, progress.may_run_backward),
                (step.frames_to_head, progress.next_forward, progress.may_run_forward),
            )
            if may_run
        ]
        texts = [f"get the {kind} frame of {self._name(*place)}" for kind, place in wanted]
        self.waiting_for = f"{' or '.join(texts)} in step {step.index}"
        timing = self._queue.start()
        frame = self._mailbox.take(
            forward=progress.may_run_forward,
            backward=progress.may_run_backward,
            prefers_forward=progress.prefers_forward,
        )
        self.waiting_for = ""
        is_forward = frame.kind is step.frames_to_head
        expected = progress.next_forward if is_forward else progress.next_backward
        has_right_kind = frame.kind in (step.frames_to_head, step.frames_to_embedding)
        place = (frame.micro_batch, frame.slice_index)
        if not has_right_kind or (frame.step_index, place) != (step.index, expected):
            raise self._wrong(
                frame,
                f"{frame.kind.name} of step {frame.step_index}, {self._name(*place)}, while it runs {self._name(*expected)} of step "
                f"{step.index}",
            )
        if is_forward and step.has_labels and self._head is not None:
            frame = self._with_labels(frame)
        action = f"wait for {' or '.join(kind for kind, _ in wanted)}"
        timing.stop(self._recorder(action, frame), partial(self._waited, step.times))
        return frame

    def _with_labels(self, frame: Frame) -> Frame:
        """Adds the labels, which the control unit sends to the head itself. The devices on the way do not see them."""
        place = (frame.step_index, frame.micro_batch, frame.slice_index)
        self.waiting_for = f"get the labels of {self._name(*place[1:])} in step {place[0]}"
        labels = self._mailbox.take_labels()
        self.waiting_for = ""
        if (labels.step_index, labels.micro_batch, labels.slice_index) != place:
            raise WrongStateError(
                f"stage {self._context.stage_index} got the labels of step {labels.step_index}, "
                f"{self._name(labels.micro_batch, labels.slice_index)}, instead of those of step {place[0]}, "
                f"{self._name(*place[1:])}: run the round again"
            )
        inputs, found = _inputs(frame.tensors), labels.tensors[LABELS]
        rows, tokens = inputs.shape[:2]
        wanted = {"classification": (rows,), "translation": (rows, *found.shape[1:2])}
        if found.shape != wanted.get(self._context.adapter.task, (rows, tokens)):
            raise self._wrong(
                frame,
                f"{rows} rows of {tokens} tokens, which have labels of shape {list(found.shape)}",
            )
        return frame.with_tensors({**frame.tensors, **labels.tensors})

    def _check_predictions(self, frame: Frame, rows_and_tokens: torch.Size) -> None:
        """Refuses predictions of other rows than those of their micro-batch."""
        rows, found = rows_and_tokens[0], frame.tensors["predictions"].shape
        wanted = {
            "classification": (rows,),
            "ner": rows_and_tokens,
            "translation": (rows, found[-1]),
        }
        if found != wanted.get(self._context.adapter.task, (rows, 2)):
            raise self._wrong(
                frame,
                f"predictions of shape {list(found)} for {rows} rows of {rows_and_tokens[1]} tokens",
            )

    def _wrong(self, frame: Frame, what: str) -> PeerLostError:
        """Returns an error that names the neighbour who sent a frame."""
        context = self._context
        host_id = context.previous_host if frame.kind.towards_head else context.next_host
        return PeerLostError(
            host_id,
            f"stage {context.stage_index} got {what} from {host_id or 'this host'}: run the same version everywhere",
        )

    def _name(self, micro_batch: int, slice_index: int) -> str:
        of_slice = f"slice {slice_index} of " if self._context.num_slices > 1 or slice_index else ""
        return f"{of_slice}micro-batch {micro_batch}"

    def _take_any(self) -> Frame:
        """Takes the next frame of a generation: tokens before passes, each in the order of arrival."""
        self.waiting_for = "get the next pass of a generation"
        timing = self._queue.start()
        frame = self._mailbox.take(forward=True, backward=True)
        timing.stop(
            self._recorder("wait for a pass", frame),
            lambda started, ended: self._metrics.waited(ended - started),
        )
        self.waiting_for = ""
        return frame

    def _evaluate(self, frame: Frame) -> Frame:
        """Evaluates one micro-batch. Returns the frame for the next stage, or the predictions."""
        side = self._queue.to_device(frame)
        activation = side.pop(ACTIVATION, None)
        with COMPUTE_LOCK, torch.no_grad():
            timing = self._queue.start()
            for module in self._modules:
                activation = module(activation, side)
            if self._head is not None:
                assert activation is not None
                predictions = self._head.predict(activation, side)
            self._finish_work(
                timing,
                self._work.forward(side),
                FORWARD_SHARE,
                self._recorder("evaluate", frame),
                lambda started, ended: self._metrics.evaluated(ended - started),
            )
        if self._head is None:
            sent = self._frame_for_next_stage(frame, activation, side)
        else:
            tensors = {"predictions": predictions}
            sent = Frame(FrameKind.PREDICTION, frame.step_index, frame.micro_batch, tensors)
        return self._queue.to_host(sent)

    def _generate(self, sequence: TokenSequence, frame: Frame) -> None:
        """Runs one pass of a sequence, and sends on its activation or the tokens that it gives."""
        inputs = self._queue.to_device(frame)
        activation = inputs.get(ACTIVATION)
        num_tokens = _inputs(inputs).shape[1]
        sequence.num_tokens += num_tokens
        positions = self._context.adapter.max_length(self._context.adapter.config)
        if sequence.num_tokens > positions:
            raise WrongStateError(
                f"sequence {frame.micro_batch} of a generation has {sequence.num_tokens} tokens, but the model has {positions} "
                "positions: run the same version everywhere"
            )
        # The only row is not padded, so the mask need not travel.
        mask = torch.ones(
            (1, sequence.num_tokens),
            dtype=torch.int64,
            device=self._context.device.torch_device,
        )
        side = {**inputs, "attention_mask": mask}
        num_emitted = 0
        timing: Timing

        def finish(num_tokens: int) -> None:
            self._finish_work(
                timing,
                self._work.generate(num_tokens, sequence.num_tokens),
                FORWARD_SHARE,
                self._recorder("generate", frame),
                lambda started, ended: self._metrics.evaluated(ended - started),
            )

        def emit(token: int) -> None:
            nonlocal num_emitted, timing
            # The units before the head have run once, for the first token of an answer.
            finish(0 if num_emitted else num_tokens)
            step_index = frame.step_index + num_emitted
            num_emitted += 1
            tokens = {"predictions": torch.tensor([[token]])}
            sent = Frame(FrameKind.PREDICTION, step_index, frame.micro_batch, tokens)
            # Sending may wait for a neighbour that needs the lock, so it is released. Other jobs may then change torch's random
            # state, but the chooser draws from its own generator.
            COMPUTE_LOCK.release()
            try:
                # Raises the failure that has ended the session meanwhile, because an answer may be long.
                self._mailbox.has_frame(forward=False, backward=False)
                self._send_backward(sent)
            finally:
                COMPUTE_LOCK.acquire()
            timing = self._queue.start()

        with COMPUTE_LOCK, torch.no_grad():
            timing = self._queue.start()
            for module in self._modules:
                activation = module(activation, side, sequence.earlier)
            assert activation is not None
            if self._head is not None:
                self._head.generate(activation, side, sequence.chooser, emit)
            else:
                finish(num_tokens)
        if self._head is None:
            sent = frame.with_tensors({ACTIVATION: activation})
            self._send_forward(self._queue.to_host(sent))

    def _waited(self, times: StepTimes, started: float, ended: float) -> None:
        times.waiting_seconds += ended - started
        self._metrics.waited(ended - started)

    def _recorder(self, action: str, frame: Frame) -> Report:
        """Records what the stage did with a micro-batch, or that it waited for it. Does not keep the frame."""
        step, micro_batch = frame.step_index, frame.micro_batch
        return lambda started, ended: SPANS.record(
            self._track, action, started, ended=ended, step=step, micro_batch=micro_batch
        )

    def _finish_work(
        self, timing: Timing, work: Work, overhead_share: float, *reports: Report
    ) -> None:
        """Ends an action, after an emulated processor would be done with it."""
        if self._processor is not None:
            self._processor.occupy(timing.started, work, overhead_share)
        timing.stop(*reports)

    def _frame_for_next_stage(
        self, frame: Frame, activation: Tensor | None, side: Mapping[str, Tensor]
    ) -> Frame:
        """Makes a frame of the activation and the side tensors that later units still need."""
        tensors = dict(side)
        if self._has_embedding:
            tensors.pop("input_ids")
        if activation is not None:
            tensors[ACTIVATION] = activation.detach()
        return frame.with_tensors(tensors)


def _inputs(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the activation of a frame, or its token ids."""
    return tensors[ACTIVATION] if ACTIVATION in tensors else tensors["input_ids"]
