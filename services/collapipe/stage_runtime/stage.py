"""One stage of the pipeline: forward, backward, update.

Reading order: `run_step` is the loop of a mini-batch, `_forward` and `_backward` are one micro-batch each.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.errors import WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import Head, ModelAdapter
from collapipe.stage_runtime.action_order import Action, ActionKind, Progress
from collapipe.stage_runtime.activation_stash import KeptBytes, count_kept_bytes
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import FORWARD_SHARE, EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.stage_runtime.optimizer import learning_rate, squared_norms
from collapipe.stage_runtime.resident_units import ResidentUnit
from collapipe.stage_runtime.stage_observer import StageObserver
from collapipe.tensors import ACTIVATION, Frame, FrameKind

IDLE = "be told what to run"


def dropout_key(
    seed: int, cluster_index: int, round_index: int, step_index: int, micro_batch: int, unit: int
) -> int:
    """The seed of everything random in one unit's pass over one micro-batch: the same in every attempt."""
    text = f"{seed}/{cluster_index}/{round_index}/{step_index}/{micro_batch}/{unit}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage needs to know of its job and its round."""

    adapter: ModelAdapter
    training: TrainingConfig
    device: torch.device
    seed: int
    cluster_index: int
    round_index: int
    stage_index: int
    in_flight: int
    first_step: int
    """Optimizer steps of the job before this round."""
    total_steps: int


@dataclass
class StepTimes:
    """Seconds of one stage in one step; on an emulated processor, its seconds."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    waiting_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What one mini-batch left at one stage."""

    squared_norms: list[float]
    loss: float | None
    times: StepTimes


@dataclass
class _Held:
    """What is kept of a micro-batch between its forward and its backward pass."""

    inputs: Tensor | None
    outputs: Tensor | None
    side: dict[str, Tensor]
    kept_bytes: int
    passed_bytes: int = 0


@dataclass
class _Step:
    """What is kept during a mini-batch."""

    index: int
    num_targets: int
    progress: Progress
    times: StepTimes = field(default_factory=StepTimes)
    loss: float = 0.0
    stash: dict[int, _Held] = field(default_factory=dict)
    kept_bytes_per_token: float | None = None
    most_held: int = 0
    most_kept_bytes: int = 0

    def hold(self, micro_batch: int, held: _Held) -> None:
        """Keeps a micro-batch until its backward pass."""
        self.stash[micro_batch] = held
        self.most_held = max(self.most_held, len(self.stash))
        kept = sum(one.kept_bytes for one in self.stash.values())
        self.most_kept_bytes = max(self.most_kept_bytes, kept)


class Stage:
    """A contiguous range of units between two neighbours.

    Args:
        context: The job and the round.
        units: The units, in order; none makes a stage that passes everything on.
        mailbox: What the neighbours sent.
        send_forward: Sends a frame to the next stage; never called by the stage with the head.
        send_backward: Sends a frame to the previous stage.
        observer: Told of every action.
        processor: What the stage is to compute like; `None` for this machine as it is.
    """

    def __init__(
        self,
        context: StageContext,
        units: Sequence[ResidentUnit],
        mailbox: Mailbox,
        send_forward: Callable[[Frame], None],
        send_backward: Callable[[Frame], None],
        observer: StageObserver | None = None,
        processor: EmulatedProcessor | None = None,
    ) -> None:
        self._context = context
        self._units = units
        self._mailbox = mailbox
        self._send_forward = send_forward
        self._send_backward = send_backward
        self._observer = observer or StageObserver()
        self._processor = processor if units else None  # who only passes on computes nothing
        modules = [unit.module for unit in units]
        last = modules[-1] if modules else None
        self._head = last if isinstance(last, Head) else None
        self._modules = modules[:-1] if self._head is not None else modules
        # the head's backward pass follows its forward pass at once: nothing is gained there
        self._recomputes = context.training.recompute and self._head is None
        self._work = StageWork(
            modules, context.adapter.config.hidden_size, recomputes=self._recomputes
        )
        self._has_embedding = bool(units) and units[0].unit_index == 0
        self._has_pending_update = False
        self._num_updates = 0
        self.waiting_for = IDLE
        """What the stage waits for, in words; empty while it computes."""

    def run_step(
        self, step_index: int, num_micro_batches: int, num_targets: int, pending_scale: float
    ) -> StepResult:
        """Runs one mini-batch forward and backward; its update stays pending.

        Args:
            step_index: Step within the round.
            num_micro_batches: Micro-batches of this mini-batch.
            num_targets: Valid targets of the whole mini-batch, the divisor of every loss.
            pending_scale: Scale of the pending update's gradients, which is applied first.

        Raises:
            WrongStateError: A frame of another step arrived.
            CollapipeError: What the mailbox was failed with.
        """
        self.apply_update(pending_scale)
        for unit in self._units:
            unit.module.train()
        progress = Progress(num_micro_batches, self._context.in_flight)
        step = _Step(step_index, num_targets, progress)
        started = time.perf_counter()
        while not progress.done:
            frame = self._take(step, FrameKind.FORWARD, FrameKind.BACKWARD)
            if frame.kind is FrameKind.FORWARD:
                self._forward(step, frame)
                progress.forwards += 1
                if self._head is None:
                    continue
                frame = Frame(FrameKind.BACKWARD, frame.step_index, frame.micro_batch)
            self._backward(step, frame)
            progress.backwards += 1
        step.times.total_seconds = time.perf_counter() - started
        self._observer.stepped(step.most_held, step.most_kept_bytes)
        self._has_pending_update = True
        self.waiting_for = IDLE
        norms = [square for unit in self._units for square in squared_norms(unit.parameters)]
        return StepResult(norms, step.loss if self._head is not None else None, step.times)

    def apply_update(self, scale: float) -> None:
        """Takes the pending optimizer step, with gradients multiplied by `scale`; harmless when none is pending."""
        if not self._has_pending_update:
            return
        context = self._context
        rate = learning_rate(
            context.training, context.first_step + self._num_updates, context.total_steps
        )
        with COMPUTE_LOCK:
            started = time.perf_counter()
            for unit in self._units:
                unit.update(rate, scale)
            seconds = self._seconds_of(started, self._work.update(), 0.0)
        self._observer.updated(seconds)
        self._num_updates += 1
        self._has_pending_update = False

    def run_evaluation(self, num_micro_batches: int) -> None:
        """Runs micro-batches forward only; predictions return through every stage to the first."""
        for unit in self._units:
            unit.module.eval()
        progress = Progress(num_micro_batches, self._context.in_flight)
        step = _Step(0, 1, progress)
        while not progress.done:
            frame = self._take(step, FrameKind.EVALUATE, FrameKind.PREDICTION)
            if frame.kind is FrameKind.EVALUATE:
                answer = self._evaluate(frame)
                progress.forwards += 1
                if self._head is None:
                    self._send_forward(answer)
                    continue
                frame = answer
            self._send_backward(frame)
            progress.backwards += 1
        self.waiting_for = IDLE

    def _take(self, step: _Step, forward: FrameKind, backward: FrameKind) -> Frame:
        progress = step.progress
        wants = [
            f"get the {kind.name.lower()} of micro-batch {number}"
            for kind, number, wanted in (
                (backward, progress.backwards, progress.wants_backward),
                (forward, progress.forwards, progress.wants_forward),
            )
            if wanted
        ]
        self.waiting_for = f"{' or '.join(wants)} in step {step.index}"
        started = time.perf_counter()
        frame = self._mailbox.take(forward=progress.wants_forward, backward=progress.wants_backward)
        waited = time.perf_counter() - started
        step.times.waiting_seconds += waited
        self._observer.waited(waited)
        self.waiting_for = ""
        number = progress.forwards if frame.kind is forward else progress.backwards
        if frame.kind not in (forward, backward) or (frame.step_index, frame.micro_batch) != (
            step.index,
            number,
        ):
            raise WrongStateError(
                f"stage {self._context.stage_index} got {frame.kind.name} of step {frame.step_index}, "
                f"micro-batch {frame.micro_batch}, while it runs micro-batch {number} of step {step.index}"
            )
        return frame

    def _forward(self, step: _Step, frame: Frame) -> None:
        tensors = self._to_device(frame.tensors)
        inputs = tensors.pop(ACTIVATION, None)
        with COMPUTE_LOCK:
            started = time.perf_counter()
            if inputs is not None and self._units:
                inputs.requires_grad_()
            measures = step.kept_bytes_per_token is None and not self._recomputes
            with (
                torch.set_grad_enabled(not self._recomputes),
                count_kept_bytes(unit.module for unit in self._units)
                if measures
                else nullcontext() as kept,
            ):
                outputs = self._run(step, frame.micro_batch, inputs, tensors)
            held = _Held(
                inputs,
                None if self._recomputes else outputs,
                tensors,
                self._kept_bytes(step, kept, inputs, tensors),
            )
            step.hold(frame.micro_batch, held)
            if self._head is not None:
                assert outputs is not None
                step.loss += float(outputs.detach())
            seconds = self._seconds_of(started, self._work.forward(tensors), FORWARD_SHARE)
        step.times.forward_seconds += seconds
        self._observer.acted(self._action(ActionKind.FORWARD, frame), seconds)
        if self._head is None:
            onward = self._onward(frame, outputs, tensors)
            held.passed_bytes = onward.byte_length
            self._send_forward(onward)

    def _backward(self, step: _Step, frame: Frame) -> None:
        held = step.stash.pop(frame.micro_batch)
        gradient = self._to_device(frame.tensors).get(ACTIVATION)
        with COMPUTE_LOCK:
            started = time.perf_counter()
            if self._units:
                outputs = held.outputs
                if self._recomputes:
                    outputs = self._run(step, frame.micro_batch, held.inputs, held.side)
                assert outputs is not None
                torch.autograd.backward(outputs, gradient)
            seconds = self._seconds_of(started, self._work.backward(held.side), 1 - FORWARD_SHARE)
        step.times.backward_seconds += seconds
        self._observer.acted(self._action(ActionKind.BACKWARD, frame), seconds)
        num_samples = held.side["attention_mask"].shape[0]
        self._observer.worked(len(self._units), num_samples, held.passed_bytes)
        answer = {}
        if not self._has_embedding:
            passed = held.inputs.grad if held.inputs is not None and self._units else gradient
            if passed is not None:
                answer[ACTIVATION] = passed
        self._send_backward(Frame(FrameKind.BACKWARD, frame.step_index, frame.micro_batch, answer))

    def _run(
        self, step: _Step, micro_batch: int, activation: Tensor | None, side: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Runs every unit on one micro-batch; with the head, the result is the loss."""
        for unit, module in zip(self._units, self._modules, strict=False):
            self._seed(step, micro_batch, unit.unit_index)
            activation = module(activation, side)
        if self._head is not None:
            assert activation is not None
            self._seed(step, micro_batch, self._units[-1].unit_index)
            smoothing = self._context.training.label_smoothing
            return self._head.loss_sum(activation, side, smoothing) / step.num_targets
        return activation

    def _evaluate(self, frame: Frame) -> Frame:
        tensors = self._to_device(frame.tensors)
        activation = tensors.pop(ACTIVATION, None)
        with COMPUTE_LOCK, torch.no_grad():
            started = time.perf_counter()
            for module in self._modules:
                activation = module(activation, tensors)
            if self._head is not None:
                assert activation is not None
                predictions = self._head.predict(activation, tensors)
            seconds = self._seconds_of(started, self._work.forward(tensors), FORWARD_SHARE)
        self._observer.evaluated(seconds)
        if self._head is None:
            return self._onward(frame, activation, tensors)
        return Frame(
            FrameKind.PREDICTION, frame.step_index, frame.micro_batch, {"predictions": predictions}
        )

    def _seconds_of(self, started: float, work: Work, overhead_share: float) -> float:
        """How long an action took; an emulated processor is waited for first."""
        if self._processor is not None:
            self._processor.occupy(started, work, overhead_share)
        return time.perf_counter() - started

    def _kept_bytes(
        self,
        step: _Step,
        counted: KeptBytes | None,
        inputs: Tensor | None,
        side: Mapping[str, Tensor],
    ) -> int:
        """What a micro-batch occupies until its backward pass: counted for the first of a mini-batch, then in proportion."""
        if self._recomputes:
            return inputs.nbytes if inputs is not None else 0
        tokens = max(side["attention_mask"].numel(), 1)
        if counted is not None:
            step.kept_bytes_per_token = counted.total / tokens
        return round((step.kept_bytes_per_token or 0.0) * tokens)

    def _onward(self, frame: Frame, activation: Tensor | None, side: Mapping[str, Tensor]) -> Frame:
        """What the next stage gets: the activation, and beside it what later units still need."""
        tensors = dict(side)
        if self._has_embedding:
            tensors = {
                name: side[name] for name in self._context.adapter.side_names if name in side
            }
        if activation is not None:
            tensors[ACTIVATION] = activation.detach()
        return Frame(frame.kind, frame.step_index, frame.micro_batch, tensors)

    def _seed(self, step: _Step, micro_batch: int, unit_index: int) -> None:
        context = self._context
        torch.manual_seed(
            dropout_key(
                context.seed,
                context.cluster_index,
                context.round_index,
                step.index,
                micro_batch,
                unit_index,
            )
        )

    def _to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._context.device) for name, tensor in tensors.items()}

    def _action(self, kind: ActionKind, frame: Frame) -> Action:
        return Action(self._context.stage_index, kind, frame.micro_batch)
