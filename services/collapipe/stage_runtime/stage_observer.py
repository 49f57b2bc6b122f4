"""Who is told what a stage does; the stage itself knows no metrics of its cluster."""

from collapipe.stage_runtime.action_order import Action


class StageObserver:
    """Is told, and does not listen; a subclass overrides what it wants to hear."""

    def acted(self, action: Action, seconds: float) -> None:
        """The stage computed one pass of one micro-batch, for so long."""

    def evaluated(self, seconds: float) -> None:
        """The stage computed one micro-batch of an evaluation."""

    def worked(self, num_units: int, num_samples: int, activation_bytes: int) -> None:
        """A micro-batch went forward and backward; so many bytes had been passed on for the next stage."""

    def updated(self, seconds: float) -> None:
        """The stage took an optimizer step."""

    def waited(self, seconds: float) -> None:
        """The stage waited for a neighbour; told wait by wait, for a mini-batch may take minutes."""

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        """The stage ran a mini-batch.

        Args:
            in_flight: Most micro-batches that it held at once.
            stash_bytes: Most bytes of theirs.
        """
