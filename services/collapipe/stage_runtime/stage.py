"""Runs one stage of a pipeline: forward passes, backward passes and updates."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from collapipe.models import KeyValues
from collapipe.stage_runtime.action_order import Progress
from collapipe.stage_runtime.activation_stash import ActivationStash
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.forward_stage import ForwardStage, Step
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.stage_runtime.optimizer import learning_rate, squared_norms
from collapipe.stage_runtime.resident_units import ResidentUnit
from collapipe.stage_runtime.stage_context import StageContext, StepResult, dropout_key
from collapipe.stage_runtime.stage_metrics import StageMetrics
from collapipe.stage_runtime.weight_gradients import deferred_gradients
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import ACTIVATION, Frame, FrameKind
from collapipe.work_shares import FORWARD_SHARE, WEIGHTS_SHARE


@dataclass(kw_only=True)
class _TrainingStep(Step):
    """The progress and the intermediate results of a mini-batch."""

    num_targets: int
    stash: ActivationStash
    deferred: deque[Work] = field(default_factory=deque)
    """The work of the deferred gradients in the stash."""
    deferred_seconds: deque[float] = field(default_factory=deque)
    """The seconds of the backward passes that left them."""
    losses: list[Tensor] = field(default_factory=list)


class Stage(ForwardStage):
    """A stage that also trains. The arguments are those of `ForwardStage`."""

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
        super().__init__(context, units, mailbox, send_forward, send_backward, metrics, processor)
        first_trained = context.adapter.first_trained_unit
        self._has_backward = bool(units) and units[-1].unit_index >= first_trained
        """Whether this stage computes gradients. False without units, and if all are before the first trained one."""
        self._needs_input_gradient = bool(units) and units[0].unit_index > first_trained
        # At the head, each backward pass follows its forward pass at once, so recomputing saves no memory.
        self._recomputes = context.recompute and self._head is None and self._has_backward
        self._num_blocks = len(self._modules) - self._has_embedding
        self._end_unit_share = 0.0
        """Part of the last forward pass that the embedding and the head took. A backward pass is divided alike."""
        layers = [layer for unit in units for layer in unit.split_layers]
        # No stage waits for the gradient of the embedding, so there splitting would shorten nothing.
        self._split_layers = [] if self._has_embedding else layers
        self._work = StageWork(
            [unit.module for unit in units],
            context.adapter.attention_size,
            recomputes=self._recomputes,
            splits=bool(self._split_layers),
        )
        self._has_pending_update = False
        self._num_updates = 0

    def run_step(
        self, step_index: int, num_micro_batches: int, num_targets: int, pending_scale: float
    ) -> StepResult:
        """Runs one mini-batch forward and backward.

        With clipping, the update of the parameters waits for the next call or for `apply_update`, because it
        needs the gradient norm of all stages. Without clipping, it follows the last backward pass at once.

        Args:
            step_index: Counted within the round.
            num_targets: Valid targets of the whole mini-batch. Losses are divided by it. Without any, loss and gradients are 0.
            pending_scale: Factor for the gradients of the previous mini-batch, if its update is pending. That
                update is applied first.

        Raises:
            PeerLostError: A neighbour sent a frame of another step, micro-batch, slice or shape.
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
            has_labels=True,
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
        on_updated: Callable[[ResidentUnit], None] = lambda unit: None,
    ) -> None:
        """Takes the pending optimizer step, if any, with the gradients multiplied by `gradient_scale`.

        Args:
            on_updated: Called for each unit as soon as it has its last update of the round, which may be an
                earlier one. Its time counts as computing.
        """
        self._begin_command()
        if not self._has_pending_update:
            if self._num_updates:
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
                on_updated(unit)
            self._finish_work(timing, self._work.update(), 0.0, self._updated)
        self._queue.settle()
        self._num_updates += 1
        self._has_pending_update = False

    def _forward(self, step: _TrainingStep, frame: Frame) -> None:
        side = self._queue.to_device(frame)
        inputs = side.pop(ACTIVATION, None)
        with COMPUTE_LOCK:
            timing = self._queue.start()
            if inputs is not None and self._needs_input_gradient:
                inputs.requires_grad_()
            place = (frame.micro_batch, frame.slice_index)
            num_tokens = (inputs if inputs is not None else side["input_ids"]).shape[1]
            masked = side["attention_mask"].shape[1]
            wanted = num_tokens + step.stash.tokens_before(*place)
            if masked != wanted:
                raise self._wrong(frame, f"a mask of {masked} instead of {wanted} tokens")
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
                found = None if gradient is None else gradient.shape
                if self._head is None and found != stashed.outputs.shape:
                    raise self._wrong(
                        frame,
                        f"a gradient of shape {None if found is None else list(found)} for an activation of shape {list(stashed.outputs.shape)}",
                    )
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
            loss_sum = self._head.loss_sum(activation, side, smoothing)
            # Without a target, the sum is 0. Its gradient is 0, too, where a division by 0 would make it NaN.
            activation = loss_sum / max(step.num_targets, 1)
            head_timing.stop(ran_end_unit)
        timing.stop(ran_units)
        return activation

    def _acted(self, kind: FrameKind, micro_batch: int, seconds: float) -> None:
        self._metrics.acted(kind, micro_batch, seconds, self._end_unit_share * seconds)

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

    def _seed(self, step: Step, place: tuple[int, int], unit_index: int) -> None:
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
