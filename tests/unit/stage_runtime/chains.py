"""Runs a pipeline with a thread for each stage, and trains the same units in a plain loop for comparison."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from collapipe.job import TrainingConfig
from collapipe.models import IGNORED, Head, ModelAdapter, initial_model, split_state
from collapipe.stage_runtime import (
    CPU,
    ComputeDevice,
    EmulatedProcessor,
    Mailbox,
    ResidentUnit,
    Stage,
    StageContext,
    StageMetrics,
    clip_scale,
)
from collapipe.stage_runtime.optimizer import learning_rate
from collapipe.stage_runtime.sequence_slices import cut_into_slices
from collapipe.stage_runtime.stage_context import StepResult, dropout_key
from collapipe.tensors import LABELS, Frame, FrameKind

SEED, CLUSTER, ROUND, FIRST_STEP, TOTAL_STEPS = 11, 2, 4, 3, 10

States = Sequence[dict[str, Tensor]]
MakeBatch = Callable[[int], dict[str, Tensor]]
Cut = Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]

TRAINING = TrainingConfig(learning_rate=1e-2, clip_norm=0.5, weight_decay=0.1, warm_up_steps=5)
WHOLE, HALVES, THIRDS, EACH = [0, 5], [0, 2, 5], [0, 1, 4, 5], [0, 1, 2, 3, 4, 5]


def held_unit(adapter: ModelAdapter, index: int, training: TrainingConfig) -> ResidentUnit:
    return ResidentUnit(index, adapter.build_unit(index), training)


class Pass(NamedTuple):
    """A pass of a micro-batch through a stage. `2F0` is the forward pass of micro-batch 0 at stage 2."""

    stage: int
    kind: FrameKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name[0]}{self.micro_batch}"


@dataclass
class Recorder(StageMetrics):
    """Records the actions of one stage. Appends its passes to a list that all stages share."""

    stage: int
    passes: list[Pass]
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By "FORWARD", "BACKWARD", "weight gradients", "evaluation" and "update"."""
    waits: list[float] = field(default_factory=list)
    end_unit_seconds: list[float] = field(default_factory=list)
    work: list[tuple[int, float, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def acted(
        self, kind: FrameKind, micro_batch: int, seconds: float, end_unit_seconds: float
    ) -> None:
        self.end_unit_seconds.append(end_unit_seconds)
        self.passes.append(Pass(self.stage, kind, micro_batch))
        self.seconds[kind.name].append(seconds)

    def computed_weight_gradients(self, seconds: float) -> None:
        self.seconds["weight gradients"].append(seconds)

    def evaluated(self, seconds: float) -> None:
        self.seconds["evaluation"].append(seconds)

    def worked(self, num_blocks: int, num_samples: float, activation_bytes: int) -> None:
        self.work.append((num_blocks, num_samples, activation_bytes))

    def updated(self, seconds: float) -> None:
        self.seconds["update"].append(seconds)

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        self.steps.append((in_flight, stash_bytes))


@dataclass
class Chain:
    """The stages of one cluster. Each runs in its own thread."""

    stages: list[Stage] = field(default_factory=list)
    units: list[ResidentUnit] = field(default_factory=list)
    mailboxes: list[Mailbox] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    observers: list["Recorder"] = field(default_factory=list)
    arrived: list[Frame] = field(default_factory=list)
    """The frames that the first stage sent backward."""
    cut: Cut = lambda batch: [batch]
    """Cuts a micro-batch into slices."""
    training: TrainingConfig = TRAINING

    def record_sent(self, index: int) -> list[Frame]:
        """Returns a list of the frames that a stage sends, which grows as the stage runs."""
        stage, sent = self.stages[index], []

        def record(send: Callable[[Frame], None], frame: Frame) -> None:
            sent.append(frame)
            send(frame)

        stage._send_forward = partial(record, stage._send_forward)
        stage._send_backward = partial(record, stage._send_backward)
        return sent

    def feed(
        self, kind: FrameKind, step: int, batches: Sequence[dict[str, Tensor]], cut: Cut
    ) -> None:
        """Gives the inputs to the first stage and the labels to the last one, in a thread, because mailboxes may be full."""

        def put() -> None:
            for number, batch in enumerate(batches):
                for index, part in enumerate(cut(batch)):
                    inputs = {name: tensor for name, tensor in part.items() if name != LABELS}
                    labels = {LABELS: part[LABELS]}
                    self.mailboxes[0].put(Frame(kind, step, number, inputs, index))
                    self.mailboxes[-1].put(Frame(FrameKind.LABELS, step, number, labels, index))

        threading.Thread(target=put, daemon=True).start()

    def train(
        self, step: int, batches: Sequence[dict[str, Tensor]], pending_scale: float = 0.0
    ) -> list[StepResult]:
        """Runs one mini-batch and returns the result of each stage."""
        self.feed(FrameKind.FORWARD, step, batches, self.cut)
        targets = _count_targets(batches)
        return self.run_in_parallel(
            lambda stage: stage.run_step(step, len(batches), targets, pending_scale)
        )

    def evaluate(self, batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        self.feed(FrameKind.EVALUATE, 0, batches, lambda batch: [batch])
        self.run_in_parallel(lambda stage: stage.run_evaluation(len(batches), has_labels=True))
        return [frame.tensors["predictions"] for frame in self.arrived]

    def run_in_parallel(self, work: Callable[[Stage], Any]) -> list[Any]:
        """Calls `work` for all stages in parallel. A failure of one stage stops all stages and is raised."""
        results: list[Any] = [None] * len(self.stages)
        failures: list[BaseException] = []

        def run(index: int) -> None:
            try:
                results[index] = work(self.stages[index])
            except BaseException as error:
                failures.append(error)
                for mailbox in self.mailboxes:
                    mailbox.fail(error)

        threads = [
            threading.Thread(target=run, args=(index,), daemon=True)
            for index in range(len(self.stages))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a stage still waits after 60 s"
        if failures:
            raise failures[0]
        return results


def _never(frame: Frame) -> None:
    raise AssertionError("the stage with the head sent a frame forward")


@dataclass
class Trained:
    """The result of training."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    losses: list[float]
    norms: list[list[float]]


def train_chain(chain: Chain, steps: Sequence[Sequence[dict[str, Tensor]]]) -> Trained:
    losses, norms, scale = [], [], 0.0
    for step, batches in enumerate(steps):
        results = chain.train(step, batches, scale)
        squares = [square for result in results for square in result.squared_norms]
        scale = clip_scale(sum(squares) ** 0.5, chain.training.clip_norm)
        assert [result.loss is None for result in results[:-1]] == [True] * (len(results) - 1)
        losses.append(results[-1].loss)
        norms.append(squares)
    chain.run_in_parallel(lambda stage: stage.apply_update(scale))
    weights, optimizer = {}, {}
    for unit in chain.units:
        weights |= {f"{unit.unit_index}/{k}": v for k, v in unit.module.state_dict().items()}
        for name, parameter in unit.module.named_parameters():
            if parameter in unit.optimizer.state:
                optimizer[f"{unit.unit_index}/{name}"] = unit.optimizer.state[parameter]
    return Trained(weights, optimizer, losses, norms)


def _count_targets(batches: Sequence[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)


def train_plainly(
    adapter: ModelAdapter,
    states: States,
    training: TrainingConfig,
    steps: Sequence[Sequence[dict[str, Tensor]]],
) -> Trained:
    """Trains in one loop, with one optimizer for all parameters. Shares only the units with a chain."""
    units = [adapter.build_unit(index) for index in range(adapter.num_units)]
    for unit, state in zip(units, states, strict=True):
        unit.load_state_dict(state)
        unit.train()
    named = {
        f"{index}/{name}": parameter
        for index, unit in enumerate(units)
        for name, parameter in unit.named_parameters()
    }
    optimizer = _optimizer(list(named.values()), training)
    result = Trained({}, {}, [], [])
    for step, batches in enumerate(steps):
        targets = _count_targets(batches)
        total = 0.0
        for number, batch in enumerate(batches):
            key = partial(dropout_key, SEED, CLUSTER, ROUND, step, number)
            activation = None
            for index, unit in enumerate(units[:-1]):
                torch.manual_seed(key(index))
                activation = unit(activation, batch)
            torch.manual_seed(key(len(units) - 1))
            head = units[-1]
            assert isinstance(head, Head)
            assert activation is not None
            loss = head.loss_sum(activation, batch, training.label_smoothing) / max(targets, 1)
            total += loss.item()
            loss.backward()
        squares = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64).item() ** 2
            for p in named.values()
            if p.grad is not None
        ]
        result.losses.append(total)
        result.norms.append(squares)
        scale = 1.0
        if training.clip_norm:
            scale = min(1.0, training.clip_norm / (sum(squares) ** 0.5 + 1e-6))
        for parameter in named.values():
            if scale < 1 and parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, FIRST_STEP + step, TOTAL_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    for index, unit in enumerate(units):
        result.weights |= {f"{index}/{k}": v for k, v in unit.state_dict().items()}
    result.optimizer = {
        name: optimizer.state[p] for name, p in named.items() if p in optimizer.state
    }
    return result


def _optimizer(parameters: list[nn.Parameter], training: TrainingConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=training.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=0.0, betas=training.betas, eps=training.epsilon, fused=True)


@dataclass
class TinyModel:
    """An adapter, the initial weights of its units, and what makes the micro-batch of a number."""

    adapter: ModelAdapter
    states: States
    make_batch: MakeBatch
    plain: dict[str, Trained] = field(default_factory=dict)
    """Results of plain loops, which several tests compare with theirs."""

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        return [self.make_batch(number) for number in range(count)]

    def chain(
        self,
        cuts: Sequence[int],
        windows: Sequence[int] = (),
        training: TrainingConfig = TRAINING,
        capacity: int | None = None,
        processor: EmulatedProcessor | None = None,
        recompute: Collection[int] = (),
        num_slices: int = 1,
        devices: Sequence[ComputeDevice] = (),
    ) -> Chain:
        """Cuts the units into stages.

        Args:
            cuts: The first unit of each stage, and one past the last unit.
            windows: The in-flight window of each stage. By default each is one longer than that of the next stage.
            capacity: Capacity of the mailboxes between stages.
            processor: The processor that every stage imitates.
            recompute: The indices of the stages that recompute.
            num_slices: Slices of a micro-batch.
            devices: The processor of each stage. By default all are CPUs.
        """
        chain = Chain(cut=partial(cut_into_slices, num_slices=num_slices), training=training)
        last = len(cuts) - 2
        chain.mailboxes = [Mailbox(capacity if index else None) for index in range(last + 1)]
        for index in range(last + 1):
            units = [
                held_unit(self.adapter, unit, training)
                for unit in range(cuts[index], cuts[index + 1])
            ]
            for unit in units:
                unit.module.load_state_dict(self.states[unit.unit_index])
            chain.units += units
            chain.observers.append(Recorder(index, chain.passes))
            context = StageContext(
                adapter=self.adapter,
                training=training,
                device=devices[index] if devices else CPU,
                seed=SEED,
                cluster_index=CLUSTER,
                round_index=ROUND,
                stage_index=index,
                previous_host=f"host-{index - 1}" if index else "",
                next_host=f"host-{index + 1}" if index < last else "",
                in_flight=windows[index] if windows else last + 1 - index,
                num_slices=num_slices,
                recompute=index in recompute,
                first_step=FIRST_STEP,
                total_steps=TOTAL_STEPS,
            )
            chain.stages.append(
                Stage(
                    context,
                    units,
                    chain.mailboxes[index],
                    send_forward=chain.mailboxes[index + 1].put if index < last else _never,
                    send_backward=chain.mailboxes[index - 1].put if index else chain.arrived.append,
                    metrics=chain.observers[index],
                    processor=processor,
                )
            )
        return chain

    def assert_equals_a_plain_loop(self, chain: Chain, num_steps: int, size: int) -> None:
        """Trains a chain, and compares it with a plain loop bit for bit."""
        batches = self.batches(num_steps * size)
        steps = [batches[first : first + size] for first in range(0, len(batches), size)]
        key = f"{num_steps} {size} {chain.training.model_dump_json(exclude={'split_backward'})}"
        if key not in self.plain:
            self.plain[key] = train_plainly(self.adapter, self.states, chain.training, steps)
        assert_identical(train_chain(chain, steps), self.plain[key])


def states_of(adapter: ModelAdapter) -> States:
    """Makes the initial weights of each unit."""
    generator = torch.Generator().manual_seed(4)
    return [
        # A factor B of LoRA starts at zero, and the gradient of its factor A would be zero, too.
        {
            name: torch.randn(tensor.shape, generator=generator) if "lora_B" in name else tensor
            for name, tensor in state.items()
        }
        for state in split_state(adapter, initial_model(adapter, None, seed=3))
    ]


def assert_identical(left: Trained, right: Trained) -> None:
    """Compares two results bit for bit."""
    assert left.losses == right.losses
    assert left.norms == right.norms
    assert left.weights.keys() == right.weights.keys()
    for name, tensor in left.weights.items():
        assert torch.equal(tensor, right.weights[name]), f"{name} differs"
    assert left.optimizer.keys() == right.optimizer.keys()
    for name, state in left.optimizer.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, right.optimizer[name][key]), f"{key} of {name} differs"
