"""The order in which a stage runs its passes: one forward, one backward (1F1B).

After a forward pass, a stage prefers a backward pass, which frees memory. After a backward pass, it prefers a
forward pass, which gives work to the next stages. If only one kind of frame has arrived, the stage takes that
frame instead of waiting. It never holds more micro-batches than its in-flight window. With equally fast
stages, this gives the 1F1B schedule of PipeDream-Flush (Narayanan et al. 2021).

With a split backward pass (Qi et al. 2023), a backward pass leaves the gradients of weights for later. The stage
computes them when no frame that it may run has arrived. Until then it holds the micro-batch, so deferred gradients
count in the window, too. If the window is full of them, they make room for the next forward pass.

Forward passes run in the order of the micro-batches, and so do backward passes and deferred gradients. So gradients
are summed in the same order whatever the timing, and the sums are the same bit for bit.
"""

from dataclasses import dataclass


@dataclass
class Progress:
    """How many passes of a mini-batch a stage has run, and which passes it may run next."""

    num_micro_batches: int
    in_flight: int
    forwards: int = 0
    backwards: int = 0
    released: int = 0
    """Micro-batches of which the stage keeps nothing any more."""
    prefers_forward: bool = False
    """Whether a forward pass comes first if both kinds of frames have arrived."""

    def ran_forward(self) -> None:
        self.forwards += 1
        self.prefers_forward = False

    def ran_backward(self) -> None:
        self.backwards += 1
        self.prefers_forward = True

    def released_one(self) -> None:
        self.released += 1

    @property
    def done(self) -> bool:
        """Whether every micro-batch went forward and backward, with all gradients."""
        return self.released == self.num_micro_batches

    @property
    def may_run_forward(self) -> bool:
        """Whether a forward pass is left and the in-flight window has room for it."""
        held = self.forwards - self.released
        return self.forwards < self.num_micro_batches and held < self.in_flight

    @property
    def may_run_backward(self) -> bool:
        """Whether a micro-batch waits for its backward pass."""
        return self.backwards < self.forwards

    @property
    def has_deferred(self) -> bool:
        """Whether gradients of weights are left to compute."""
        return self.released < self.backwards
