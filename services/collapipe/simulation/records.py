"""The records that a run leaves: of each round, and of each device over all rounds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    Args:
        reason: Why the round has no feasible plan. Empty if it has one; otherwise all other values are 0.
        delay_seconds: Simulated time of the round.
        predicted_seconds: Time that the strategy predicted from its knowledge of hosts and links.
        energy_joules_mean: Mean over all devices, idle devices included.
        energy_over_budget_max: Largest ratio of a device's energy to its budget.
        backlog_mean, backlog_max: Of the devices with a budget, after the round.
        memory_bytes_max: Memory of the device that needs most. If no device runs a block, of the host that does.
        bubble_ratio, num_micro_batches, num_segments: Values of the slowest cluster.
        moved_units: Units that changed their host, in all clusters.
        objective: Value of docs/scheduling.md (13) with the simulated time and energy.
        decision_seconds: Time of all decisions until the interference settles, on this machine.
    """

    round_index: int
    reason: str = ""
    delay_seconds: float = 0.0
    predicted_seconds: float = 0.0
    energy_joules_mean: float = 0.0
    energy_over_budget_max: float = 0.0
    backlog_mean: float = 0.0
    backlog_max: float = 0.0
    memory_bytes_max: float = 0.0
    bubble_ratio: float = 0.0
    num_micro_batches: int = 0
    num_segments: int = 0
    moved_units: int = 0
    objective: float = 0.0
    decision_seconds: float = 0.0

    @property
    def feasible(self) -> bool:
        return not self.reason


@dataclass
class DeviceRecord:
    """One device over all feasible rounds.

    Args:
        energy_budget_joules: Budget of a round. `None` means mains power.
        energy_joules, blocks: Sums over the rounds.
        backlog: Backlog after the last round.
        memory_bytes_max: Memory in the round that needed most.
        battery_joules: Capacity of its battery. `None` means that it has none.
        empty_after: Number of rounds after which its battery was empty. `None` means never.
    """

    host_id: str
    energy_budget_joules: float | None
    energy_joules: float = 0.0
    backlog: float = 0.0
    memory_bytes_max: float = 0.0
    blocks: int = 0
    num_rounds: int = 0
    battery_joules: float | None = None
    empty_after: int | None = None

    @property
    def mean_energy_joules(self) -> float:
        return self.energy_joules / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True)
class StrategyRun:
    """All rounds of a strategy with one seed.

    Args:
        value: Value of the swept parameter. `None` if the scenario has no sweep.
        rounds: In order. A single infeasible one if no round can have a plan.
    """

    strategy: str
    seed: int
    value: float | None
    rounds: list[RoundRecord]
    devices: list[DeviceRecord]
