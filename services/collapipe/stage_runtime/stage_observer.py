"""The interface through which a stage reports its actions, so that it does not depend on metrics."""

from collapipe.tensors import FrameKind


class StageObserver:
    """Ignores every event. A subclass overrides the events that it needs."""

    def acted(self, kind: FrameKind, micro_batch: int, seconds: float) -> None:
        """The stage computed a pass of one micro-batch; `kind` is FORWARD or BACKWARD."""

    def evaluated(self, seconds: float) -> None:
        """The stage computed one micro-batch of an evaluation."""

    def worked(self, num_units: int, num_samples: int, activation_bytes: int) -> None:
        """A micro-batch went forward and backward; `activation_bytes` went to the next stage."""

    def updated(self, seconds: float) -> None:
        """The stage computed an optimizer step."""

    def waited(self, seconds: float) -> None:
        """The stage waited for one frame. Reported after each wait, because a mini-batch may take minutes."""

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        """The stage ran a mini-batch. The arguments are the most micro-batches and stashed bytes at once."""
