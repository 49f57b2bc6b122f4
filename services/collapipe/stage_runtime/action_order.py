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

A micro-batch of a language model may be cut along its rows into slices. A stage then runs passes over slices: forward
passes in the order of the rows, and, once all slices of a micro-batch went forward, backward passes from the last
slice to the first. The window is still a number of micro-batches.
"""

from dataclasses import dataclass


@dataclass
class Progress:
    """How many passes of a mini-batch a stage has run, and which passes it may run next."""

    num_micro_batches: int
    in_flight: int
    num_slices: int = 1
    """Slices of a micro-batch. Each has a pass of its own."""
    forwards: int = 0
    backwards: int = 0
    released: int = 0
    """Slices of which the stage keeps nothing any more."""
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
        return self.released == self.num_micro_batches * self.num_slices

    @property
    def next_forward(self) -> tuple[int, int]:
        """The micro-batch and the slice of the next forward pass."""
        return divmod(self.forwards, self.num_slices)

    @property
    def next_backward(self) -> tuple[int, int]:
        """The micro-batch and the slice of the next backward pass."""
        return self._backward_at(self.backwards)

    @property
    def next_deferred(self) -> tuple[int, int]:
        """The micro-batch and the slice of the oldest deferred gradients."""
        return self._backward_at(self.released)

    @property
    def may_run_forward(self) -> bool:
        """Whether a forward pass is left and the in-flight window has room for it."""
        held = self.forwards - self.released
        is_left = self.forwards < self.num_micro_batches * self.num_slices
        return is_left and held < self.in_flight * self.num_slices

    @property
    def may_run_backward(self) -> bool:
        """Whether a micro-batch, with all its slices, waits for a backward pass."""
        return self.next_backward[0] < self.next_forward[0]

    @property
    def has_deferred(self) -> bool:
        """Whether gradients of weights are left to compute."""
        return self.released < self.backwards

    def _backward_at(self, number: int) -> tuple[int, int]:
        micro_batch, later_slices = divmod(number, self.num_slices)
        return micro_batch, self.num_slices - 1 - later_slices
