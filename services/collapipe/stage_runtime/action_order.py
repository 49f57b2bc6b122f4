"""1F1B, driven by what has arrived: which action a stage takes next.

A stage prefers a backward pass, which frees memory, over a forward pass, and never holds more than
`in_flight` forward passes. With equal stages this is the one-forward-one-backward schedule; with unequal
ones it does not wait for a gradient while an activation is at hand. Both kinds run in the order of the
micro-batches, so gradients accumulate in that order whatever the timing.
"""

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One thing that a stage does; printed as `2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass
class Progress:
    """How far a stage is in a mini-batch."""

    num_micro_batches: int
    in_flight: int
    forwards: int = 0
    backwards: int = 0

    @property
    def done(self) -> bool:
        """Every micro-batch went forward and backward."""
        return self.backwards == self.num_micro_batches

    @property
    def wants_forward(self) -> bool:
        """A forward pass may run: one is left, and the window has room."""
        held = self.forwards - self.backwards
        return self.forwards < self.num_micro_batches and held < self.in_flight

    @property
    def wants_backward(self) -> bool:
        """A backward pass may run: some micro-batch is held."""
        return self.backwards < self.forwards
