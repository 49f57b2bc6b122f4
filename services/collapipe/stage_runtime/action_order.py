"""The order in which a stage runs its passes: one forward, one backward (1F1B).

After a forward pass, a stage prefers a backward pass, which frees memory. After a backward pass, it prefers a
forward pass, which gives work to the next stages. If only one kind of frame has arrived, the stage takes that
frame instead of waiting. It never holds more micro-batches than its in-flight window. With equally fast
stages, this gives the 1F1B schedule of PipeDream-Flush (Narayanan et al. 2021).

Forward passes run in the order of the micro-batches, and so do backward passes. So gradients are summed in
the same order whatever the timing, and the sums are the same bit for bit.
"""

from dataclasses import dataclass


@dataclass
class Progress:
    """How many passes of a mini-batch a stage has run, and which passes it may run next."""

    num_micro_batches: int
    in_flight: int
    forwards: int = 0
    backwards: int = 0
    prefers_forward: bool = False
    """Whether a forward pass comes first if both kinds of frames have arrived."""

    def ran_forward(self) -> None:
        self.forwards += 1
        self.prefers_forward = False

    def ran_backward(self) -> None:
        self.backwards += 1
        self.prefers_forward = True

    @property
    def done(self) -> bool:
        """Whether every micro-batch went forward and backward."""
        return self.backwards == self.num_micro_batches

    @property
    def may_run_forward(self) -> bool:
        """Whether a forward pass is left and the in-flight window has room for it."""
        held = self.forwards - self.backwards
        return self.forwards < self.num_micro_batches and held < self.in_flight

    @property
    def may_run_backward(self) -> bool:
        """Whether a micro-batch waits for its backward pass."""
        return self.backwards < self.forwards
