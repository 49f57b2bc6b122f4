"""Virtual queues: how far devices have exceeded their long-term energy budgets."""

from collections.abc import Mapping


def backlogs_after(
    backlogs: Mapping[str, float],
    energy_joules: Mapping[str, float],
    budgets_joules: Mapping[str, float],
) -> dict[str, float]:
    """Returns the backlog of every host with a budget after a round: docs/scheduling.md (12).

    A backlog is counted in budgets of one round. A host that is missing in `backlogs` has no backlog, and a
    host that is missing in `energy_joules` used no energy.
    """
    return {
        host_id: max(
            backlogs.get(host_id, 0.0) + energy_joules.get(host_id, 0.0) / budget - 1.0, 0.0
        )
        for host_id, budget in budgets_joules.items()
    }
