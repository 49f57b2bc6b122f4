"""The interface through which a stage reports its actions, so that it needs no metrics."""

from collapipe.tensors import FrameKind


class StageObserver:
    """Ignores every event. A subclass overrides the events that it needs."""

    def acted(self, kind: FrameKind, micro_batch: int, seconds: float) -> None:
        """The stage computed a pass of one micro-batch; `kind` is FORWARD or BACKWARD."""

    def evaluated(self, seconds: float) -> None:
        """The stage computed one micro-batch of an evaluation."""

    def worked(self, num_units: int, num_samples: int, activation_bytes: int) -> None:
        """A micro-batch went forward and backward.

        Args:
            activation_bytes: Bytes that the stage sent to the next stage in the forward pass.
        """

    def updated(self, seconds: float) -> None:
        """The stage computed an optimizer step."""

    def waited(self, seconds: float) -> None:
        """The stage waited for one frame. Reported after each wait, because a mini-batch may take minutes."""

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        """The stage ran a mini-batch.

        Args:
            in_flight: Most micro-batches that the stage held at once.
            stash_bytes: Most bytes that the stage held at once for backward passes.
        """
