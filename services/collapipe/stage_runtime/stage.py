"""Runs one stage of a pipeline: forward passes, backward passes, updates, evaluations and generations."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from collapipe.errors import WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import GenerationSettings, Head, KeyValues, ModelAdapter
from collapipe.stage_runtime.action_order import Progress
from collapipe.stage_runtime.activation_stash import ActivationStash
from collapipe.stage_runtime.compute_device import ComputeDevice, Report, Timing
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.stage_runtime.optimizer import learning_rate, squared_norms
from collapipe.stage_runtime.resident_units import ResidentUnit
from collapipe.stage_runtime.sequences import Sequences, TokenSequence
from collapipe.stage_runtime.stage_metrics import StageMetrics
from collapipe.stage_runtime.weight_gradients import deferred_gradients
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import ACTIVATION, Frame, FrameKind
from collapipe.work_shares import FORWARD_SHARE, WEIGHTS_SHARE

_IDLE = "get the next command"


def dropout_key(
    seed: int,
    cluster_index: int,
    round_index: int,
    step_index: int,
    micro_batch: int,
    unit: int,
    slice_index: int = 0,
) -> int:
    """Returns the random seed for one unit's pass over one micro-batch or slice. It is the same in every attempt."""
    text = f"{seed}/{cluster_index}/{round_index}/{step_index}/{micro_batch}/{unit}"
    if slice_index:
        text += f"/{slice_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The settings of a stage that stay fixed during one round."""

    adapter: ModelAdapter
    training: TrainingConfig
    device: ComputeDevice
    seed: int
    cluster_index: int
    round_index: int
    stage_index: int
    in_flight: int
    num_slices: int = 1
    """Slices of a micro-batch."""
    recompute: bool
    first_step: int
    """Optimizer steps of the job before this round."""
    total_steps: int
    """Optimizer steps of the whole job."""


@dataclass
class StepTimes:
    """Seconds of one stage in one step. On an emulated processor, the seconds of that processor."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    waiting_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """The result of one mini-batch at one stage."""

    squared_norms: list[float]
    """The squared gradient norm of each trained parameter of the stage."""
    loss: float | None
    """`None` at a stage without the head."""
    times: StepTimes


@dataclass(kw_only=True)
class _Step:
    """The progress of this stage through the micro-batches of a mini-batch or of an evaluation."""

    index: int
    progress: Progress
    frames_to_head: FrameKind
    """Kind of the frames that come from the previous stage."""
    frames_to_embedding: FrameKind
    """Kind of the frames that come from the next stage."""
    times: StepTimes = field(default_factory=StepTimes)


@dataclass(kw_only=True)
class _TrainingStep(_Step):
    """The progress and the intermediate results of a mini-batch."""

    num_targets: int
    stash: ActivationStash
    deferred: deque[Work] = field(default_factory=deque)
    """The work of the deferred gradients in the stash."""
    deferred_seconds: deque[float] = field(default_factory=deque)
    """The seconds of the backward passes that left them."""
    losses: list[Tensor] = field(default_factory=list)


class Stage:
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
        first_trained = context.adapter.first_trained_unit
        self._has_backward = bool(units) and units[-1].unit_index >= first_trained
        """Whether this stage computes gradients. False without units, and if all are before the first trained one."""
        self._needs_input_gradient = bool(units) and units[0].unit_index > first_trained
        # At the head, each backward pass follows its forward pass at once, so recomputing saves no memory.
        self._recomputes = context.recompute and self._head is None and self._has_backward
        self._has_embedding = bool(units) and units[0].unit_index == 0
        self._num_blocks = len(self._modules) - self._has_embedding
        self._end_unit_share = 0.0
        """Part of the last forward pass that the embedding and the head took. A backward pass is divided alike."""
        layers = [layer for unit in units for layer in unit.split_layers]
        # No stage waits for the gradient of the embedding, so there splitting would shorten nothing.
        self._split_layers = [] if self._has_embedding else layers
        self._work = StageWork(
            modules,
            context.adapter.attention_size,
            recomputes=self._recomputes,
            splits=bool(self._split_layers),
        )
        self._has_pending_update = False
        self._num_updates = 0
        self._track = f"compute for cluster {context.cluster_index}"
        """The track of this stage in a trace. The edge server has a stage for each cluster."""
        self.waiting_for = _IDLE
        """Completes the sentence "The stage waits to ...". Empty while the stage computes."""
        self._idle_since: float | None = time.perf_counter()
        """When the stage began to wait for a command; `None` while it runs one."""

    def run_step(
        self, step_index: int, num_micro_batches: int, num_targets: int, pending_scale: float
    ) -> StepResult:
        """Runs one mini-batch forward and backward.

        With clipping, the update of the parameters waits for the next call or for `apply_update`, because it
        needs the gradient norm of all stages. Without clipping, it follows the last backward pass at once.

        Args:
            step_index: Counted within the round.
            num_targets: Valid targets of the whole mini-batch. Losses are divided by it.
            pending_scale: Factor for the gradients of the previous mini-batch, if its update is pending. That
                update is applied first.

        Raises:
            WrongStateError: A frame of another step, micro-batch or slice arrived.
            CollapipeError: The session was aborted. The mailbox was given this error.
        """
        self.apply_update(pending_scale)
        for unit in self._units:
            unit.module.train()
        num_slices = self._context.num_slices
        progress = Progress(num_micro_batches, self._context.in_flight, num_slices)
        step = _TrainingStep(
            index=step_index,
            progress=progress,
            frames_to_head=FrameKind.FORWARD,
            frames_to_embedding=FrameKind.BACKWARD,
            num_targets=num_targets,
            stash=ActivationStash(
                [unit.module for unit in self._units],
                num_slices,
                keeps_graph=self._has_backward and not self._recomputes,
            ),
        )
        started = time.perf_counter()
        while not progress.done:
            if progress.has_deferred and not self._mailbox.has_frame(
                forward=progress.may_run_forward, backward=progress.may_run_backward
            ):
                self._compute_deferred(step)
                continue
            frame = self._take(step)
            if frame.kind is FrameKind.BACKWARD:
                self._backward(step, frame)
                continue
            self._forward(step, frame)
            # The head computes the loss, so its backward passes need no gradient from another stage.
            while self._head is not None and progress.may_run_backward:
                micro_batch, index = progress.next_backward
                self._backward(
                    step, Frame(FrameKind.BACKWARD, step_index, micro_batch, slice_index=index)
                )
        self._queue.settle()
        step.times.total_seconds = time.perf_counter() - started
        self._metrics.stepped(step.stash.most_micro_batches, step.stash.most_bytes)
        self._has_pending_update = True
        started = time.perf_counter()
        norms = squared_norms(gradient for unit in self._units for gradient in unit.gradients())
        SPANS.record(self._track, "gradient norms", started)
        if not self._context.training.clip_norm:
            self.apply_update(1.0)
        self._end_command()
        return StepResult(norms, _sum(step.losses) if self._head is not None else None, step.times)

    def apply_update(
        self,
        gradient_scale: float,
        on_updated: Callable[[ResidentUnit], None] | None = None,
    ) -> None:
        """Takes the pending optimizer step, if any, with the gradients multiplied by `gradient_scale`.

        Args:
            on_updated: Called for each unit as soon as it has its last update of the round, which may be an
                earlier one. Its time counts as computing.
        """
        self._begin_command()
        if not self._has_pending_update:
            if on_updated is not None and self._num_updates:
                for unit in self._units:
                    on_updated(unit)
            return
        context = self._context
        rate = learning_rate(
            context.training, context.first_step + self._num_updates, context.total_steps
        )
        with COMPUTE_LOCK:
            timing = self._queue.start()
            for unit in self._units:
                unit.update(rate, gradient_scale)
                if on_updated is not None:
                    on_updated(unit)
            self._finish_work(timing, self._work.update(), 0.0, self._updated)
        self._queue.settle()
        self._num_updates += 1
        self._has_pending_update = False

    def run_evaluation(self, num_micro_batches: int) -> None:
        """Runs micro-batches forward only. The predictions travel back through all stages to the first."""
        self._begin_command()
        for unit in self._units:
            unit.module.eval()
        progress = Progress(num_micro_batches, self._context.in_flight)
        step = _Step(
            index=0,
            progress=progress,
            frames_to_head=FrameKind.EVALUATE,
            frames_to_embedding=FrameKind.PREDICTION,
        )
        while not progress.done:
            frame = self._take(step)
            if frame.kind is FrameKind.EVALUATE:
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
        self._end_command()

    def _begin_command(self) -> None:
        if self._idle_since is not None:
            SPANS.record(self._track, "wait for a command", self._idle_since)
            self._idle_since = None

    def _end_command(self) -> None:
        self.waiting_for, self._idle_since = _IDLE, time.perf_counter()

    def _take(self, step: _Step) -> Frame:
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
        action = f"wait for {' or '.join(kind for kind, _ in wanted)}"
        timing.stop(self._recorder(action, frame), partial(self._waited, step.times))
        self.waiting_for = ""
        is_forward = frame.kind is step.frames_to_head
        expected = progress.next_forward if is_forward else progress.next_backward
        has_right_kind = frame.kind in (step.frames_to_head, step.frames_to_embedding)
        place = (frame.micro_batch, frame.slice_index)
        if not has_right_kind or (frame.step_index, place) != (step.index, expected):
            raise WrongStateError(
                f"stage {self._context.stage_index} got {frame.kind.name} of step {frame.step_index}, "
                f"{self._name(*place)}, while it runs {self._name(*expected)} of step {step.index}"
            )
        return frame

    def _name(self, micro_batch: int, slice_index: int) -> str:
        of_slice = f"slice {slice_index} of " if self._context.num_slices > 1 or slice_index else ""
        return f"{of_slice}micro-batch {micro_batch}"

    def _take_any(self) -> Frame:
        """Takes the next frame of a generation, in the order of arrival."""
        self.waiting_for = "get the next pass of a generation"
        timing = self._queue.start()
        frame = self._mailbox.take(forward=True, backward=True)
        timing.stop(
            self._recorder("wait for a pass", frame),
            lambda started, ended: self._metrics.waited(ended - started),
        )
        self.waiting_for = ""
        return frame

    def _forward(self, step: _TrainingStep, frame: Frame) -> None:
        side = self._queue.to_device(frame)
        inputs = side.pop(ACTIVATION, None)
        with COMPUTE_LOCK:
            timing = self._queue.start()
            if inputs is not None and self._needs_input_gradient:
                inputs.requires_grad_()
            place = (frame.micro_batch, frame.slice_index)
            num_tokens = (inputs if inputs is not None else side["input_ids"]).shape[1]
            outputs, stashed = step.stash.run_forward(
                place,
                inputs if self._has_backward else None,
                side,
                num_tokens,
                lambda earlier: self._run_units(step, place, inputs, side, earlier),
            )
            if self._head is not None:
                assert outputs is not None
                step.losses.append(outputs.detach())
            self._finish_work(
                timing,
                self._work.forward(side, num_tokens),
                FORWARD_SHARE,
                self._recorder("forward", frame),
                partial(self._ran_forward, step, frame.micro_batch),
            )
        step.progress.ran_forward()
        if self._head is None:
            sent = self._frame_for_next_stage(frame, outputs, side)
            stashed.sent_bytes = sent.byte_length
            self._send_forward(self._queue.to_host(sent))

    def _backward(self, step: _TrainingStep, frame: Frame) -> None:
        gradient = self._queue.to_device(frame).get(ACTIVATION)
        with COMPUTE_LOCK:
            timing = self._queue.start()
            if self._recomputes and frame.slice_index + 1 == self._context.num_slices:
                self._recompute(step, frame.micro_batch)
                timing.stop(self._recorder("recompute", frame))
            stashed, (kept, kept_gradients) = step.stash.pop(frame.micro_batch, frame.slice_index)
            if self._has_backward:
                assert stashed.outputs is not None
                with deferred_gradients(self._split_layers) as deferred:
                    torch.autograd.backward([stashed.outputs, *kept], [gradient, *kept_gradients])
                if self._split_layers:
                    step.stash.defer(deferred)
            work, share = Work(), 0.0
            if self._has_backward:
                work = self._work.backward(stashed.side, stashed.num_tokens)
                share = 1 - FORWARD_SHARE - (WEIGHTS_SHARE if self._split_layers else 0.0)
            self._finish_work(
                timing,
                work,
                share,
                self._recorder("backward", frame),
                partial(self._ran_backward, step, frame.micro_batch),
            )
        if self._split_layers:
            step.deferred.append(self._work.weight_gradients(stashed.side, stashed.num_tokens))
        # Telemetry may be read between two slices. So each counts its part of the samples, as it counts its time.
        num_samples = stashed.side["attention_mask"].shape[0] / self._context.num_slices
        self._metrics.worked(self._num_blocks, num_samples, stashed.sent_bytes)
        tensors = {}
        if self._units:
            gradient = stashed.inputs.grad if stashed.inputs is not None else None
        if gradient is not None:
            tensors[ACTIVATION] = gradient
        self._send_backward(self._queue.to_host(frame.with_tensors(tensors)))
        step.progress.ran_backward()
        if not self._split_layers:
            step.progress.released_one()
        elif self._recomputes:
            # The memory of a stage that recomputes has room for the tensors of one micro-batch only.
            self._compute_deferred(step)

    def _recompute(self, step: _TrainingStep, micro_batch: int) -> None:
        """Repeats the forward passes of all slices of a micro-batch, and keeps their outputs."""
        for index, stashed in enumerate(step.stash.slices(micro_batch)):
            earlier = step.stash.begin_slice(micro_batch, index)
            stashed.outputs = self._run_units(
                step, (micro_batch, index), stashed.inputs, stashed.side, earlier
            )

    def _compute_deferred(self, step: _TrainingStep) -> None:
        """Computes the gradients of the weights that the oldest backward pass has left."""
        deferred, (micro_batch, _) = step.stash.pop_deferred(), step.progress.next_deferred
        with COMPUTE_LOCK:
            timing = self._queue.start()
            deferred.compute()
            self._finish_work(
                timing,
                step.deferred.popleft(),
                WEIGHTS_SHARE,
                partial(self._computed_deferred, step, micro_batch),
            )
        step.progress.released_one()

    def _run_units(
        self,
        step: _TrainingStep,
        place: tuple[int, int],
        activation: Tensor | None,
        side: Mapping[str, Tensor],
        earlier: KeyValues | None,
    ) -> Tensor | None:
        """Runs every unit on one micro-batch or slice. At the stage with the head, the result is the loss."""
        timing, ends = self._queue.start(), list[float]()

        def ran_end_unit(started: float, ended: float) -> None:
            ends.append(ended - started)

        def ran_units(started: float, ended: float) -> None:
            self._end_unit_share = sum(ends) / (ended - started) if ended > started else 0.0

        for unit, module in zip(self._units, self._modules, strict=False):
            self._seed(step, place, unit.unit_index)
            activation = module(activation, side, earlier)
            if unit.unit_index == 0:
                timing.stop(ran_end_unit)
        if self._head is not None:
            assert activation is not None
            head_timing = self._queue.start()
            self._seed(step, place, self._units[-1].unit_index)
            smoothing = self._context.training.label_smoothing
            activation = self._head.loss_sum(activation, side, smoothing) / step.num_targets
            head_timing.stop(ran_end_unit)
        timing.stop(ran_units)
        return activation

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
        num_tokens = (inputs["input_ids"] if activation is None else activation).shape[1]
        sequence.num_tokens += num_tokens
        # The only row is not padded, so the mask need not travel.
        mask = torch.ones(
            (1, sequence.num_tokens),
            dtype=torch.int64,
            device=self._context.device.torch_device,
        )
        side = {**inputs, "attention_mask": mask}
        num_emitted = 0

        def emit(token: int) -> None:
            nonlocal num_emitted
            # Raises the failure that has ended the session meanwhile, because an answer may be long.
            self._mailbox.has_frame(forward=False, backward=False)
            step_index = frame.step_index + num_emitted
            num_emitted += 1
            tokens = {"predictions": torch.tensor([[token]])}
            self._send_backward(Frame(FrameKind.PREDICTION, step_index, frame.micro_batch, tokens))

        with COMPUTE_LOCK, torch.no_grad():
            timing = self._queue.start()
            for module in self._modules:
                activation = module(activation, side, sequence.earlier)
            assert activation is not None
            if self._head is not None:
                self._head.generate(activation, side, sequence.chooser, emit)
            self._finish_work(
                timing,
                self._work.generate(num_tokens, sequence.num_tokens),
                FORWARD_SHARE,
                self._recorder("generate", frame),
                lambda started, ended: self._metrics.evaluated(ended - started),
            )
        if self._head is None:
            sent = frame.with_tensors({ACTIVATION: activation})
            self._send_forward(self._queue.to_host(sent))

    def _acted(self, kind: FrameKind, micro_batch: int, seconds: float) -> None:
        self._metrics.acted(kind, micro_batch, seconds, self._end_unit_share * seconds)

    def _waited(self, times: StepTimes, started: float, ended: float) -> None:
        times.waiting_seconds += ended - started
        self._metrics.waited(ended - started)

    def _ran_forward(
        self, step: _TrainingStep, micro_batch: int, started: float, ended: float
    ) -> None:
        step.times.forward_seconds += ended - started
        self._acted(FrameKind.FORWARD, micro_batch, ended - started)

    def _ran_backward(
        self, step: _TrainingStep, micro_batch: int, started: float, ended: float
    ) -> None:
        step.times.backward_seconds += ended - started
        if self._split_layers:
            step.deferred_seconds.append(ended - started)
        else:
            self._acted(FrameKind.BACKWARD, micro_batch, ended - started)

    def _computed_deferred(
        self, step: _TrainingStep, micro_batch: int, started: float, ended: float
    ) -> None:
        seconds = ended - started
        SPANS.record(
            self._track,
            "weight gradients",
            started,
            ended=ended,
            step=step.index,
            micro_batch=micro_batch,
        )
        step.times.backward_seconds += seconds
        backward_seconds = step.deferred_seconds.popleft()
        self._acted(FrameKind.BACKWARD, micro_batch, backward_seconds + seconds)
        self._metrics.computed_weight_gradients(seconds)

    def _updated(self, started: float, ended: float) -> None:
        SPANS.record(self._track, "update", started, ended=ended)
        self._metrics.updated(ended - started)

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
            tensors = {
                name: side[name] for name in self._context.adapter.side_names if name in side
            }
        if activation is not None:
            tensors[ACTIVATION] = activation.detach()
        return frame.with_tensors(tensors)

    def _seed(self, step: _Step, place: tuple[int, int], unit_index: int) -> None:
        context, (micro_batch, slice_index) = self._context, place
        key = dropout_key(
            context.seed,
            context.cluster_index,
            context.round_index,
            step.index,
            micro_batch,
            unit_index,
            slice_index,
        )
        context.device.seed(key)


def _sum(losses: Sequence[Tensor]) -> float:
    """Adds the losses of micro-batches in order, in double precision. `sum` of newer Pythons gives other bits."""
    total = 0.0
    for loss in torch.stack(list(losses)).tolist() if losses else []:
        total += loss
    return total
