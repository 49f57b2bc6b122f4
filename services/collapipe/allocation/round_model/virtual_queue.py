"""Virtual queues: how far a device is over its long-term energy budget."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualQueue:
    """Backlog of one device, in rounds' budgets: design (12).

    Args:
        budget_joules: What a round may cost in the long run.
        backlog: How far the rounds so far went beyond.
    """

    budget_joules: float
    backlog: float = 0.0

    def after(self, energy_joules: float) -> "VirtualQueue":
        """The queue after a round that used so much energy: design (12)."""
        backlog = max(self.backlog + energy_joules / self.budget_joules - 1.0, 0.0)
        return VirtualQueue(self.budget_joules, backlog)
