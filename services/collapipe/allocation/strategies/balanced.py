"""Segments by speed under memory limits: `proportional`, and TITANIC, which first asks for the fewest devices.

A device's window, and thereby what its memory holds, depends on how many devices behind it take part. So first it is
decided who does, exactly. Then blocks are handed out one by one, each to the device that is least slow with it; that
is optimal, because a device's time grows with its blocks. Ties go to the device that registered first.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem
from collapipe.allocation.strategies.complete_plan import (
    Stages,
    classical_window,
    needed_bytes,
    num_micro_batches,
    place_blocks,
)
from collapipe.errors import InfeasibleError


def place_proportionally(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Makes the slowest segment as fast as it can be, with the fewest devices that reach that.

    Each device more is a hop more.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    balance = _Balance(problem, cluster)
    seconds = balance.fastest(lambda counts: True)
    return balance.place(balance.within(seconds)[0], seconds)


def place_on_the_fewest(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """TITANIC: the least set of devices whose memory holds the model, and of those the one whose slowest segment is fastest.

    The integer program has one binary a device and one integer for its blocks; with the number of devices fixed it
    is solved exactly by looking for the least time of the slowest segment.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    balance = _Balance(problem, cluster)
    fewest = balance.within(balance.times[-1])[0]
    seconds = balance.fastest(lambda counts: fewest in counts)
    return balance.place(fewest, seconds)


class _Balance:
    """Which devices can run the model within a time of the slowest segment."""

    def __init__(self, problem: RoundProblem, cluster: ClusterProblem) -> None:
        self._problem = problem
        self._cluster = cluster
        self._num_blocks = problem.model.num_blocks
        self._size = problem.mini_batch / num_micro_batches(cluster)
        devices = cluster.devices
        if not devices:
            raise InfeasibleError("the cluster has no devices: a pipeline needs at least 1")
        self._capacities = [
            [self._capacity(device, active) for active in range(1, len(devices) - index + 1)]
            for index, device in enumerate(devices)
        ]
        most = max(blocks for blocks, _ in _strongest(self._capacities).values())
        if most == 0:
            raise InfeasibleError(self._none_holds_a_block())
        if most < self._num_blocks:
            raise InfeasibleError(
                f"the {len(devices)} devices can hold {most} of {self._num_blocks} blocks: add devices or memory, "
                "use more and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
            )
        self.times = sorted(
            {
                self._seconds(device, count)
                for device in devices
                for count in range(1, self._num_blocks + 1)
            }
        )

    def within(self, seconds: float) -> list[int]:
        """Numbers of devices, ascending, that can hold the model with no segment slower than that."""
        return sorted(
            active
            for active, (blocks, _) in self._strongest_within(seconds).items()
            if blocks >= self._num_blocks
        )

    def fastest(self, accept: Callable[[Sequence[int]], bool]) -> float:
        """The least time of the slowest segment for which the numbers of devices are accepted."""

        def feasible(seconds: float) -> bool:
            counts = self.within(seconds)
            return bool(counts) and accept(counts)

        return self.times[bisect_left(self.times, True, key=feasible)]

    def place(self, active: int, seconds: float) -> Stages:
        """Places the model on so many devices, no segment slower than that."""
        chosen = self._strongest_within(seconds)[active][1]
        return place_blocks(self._problem, self._cluster, self._hand_out(chosen))

    def _strongest_within(self, seconds: float) -> dict[int, tuple[int, tuple[int, ...]]]:
        return _strongest(
            [
                [min(capacity, self._blocks_within(device, seconds)) for capacity in row]
                for device, row in zip(self._cluster.devices, self._capacities, strict=True)
            ]
        )

    def _seconds(self, device: Host, num_blocks: int) -> float:
        return device.compute_seconds(self._size, num_blocks)

    def _blocks_within(self, device: Host, seconds: float) -> int:
        return sum(self._seconds(device, n) <= seconds for n in range(1, self._num_blocks + 1))

    def _capacity(self, device: Host, active: int) -> int:
        """Blocks that a device can hold when so many devices, from it on, take part."""
        if device.memory_bytes is None:
            return self._num_blocks
        window = classical_window(self._problem, self._cluster, active)
        fits = [
            count
            for count in range(1, self._num_blocks + 1)
            if self._needed(device, count, window) <= device.memory_bytes
        ]
        return max(fits, default=0)

    def _needed(self, device: Host, num_blocks: int, window: int) -> float:
        return needed_bytes(self._problem, self._cluster, device, 1, num_blocks + 1, window)

    def _hand_out(self, chosen: Sequence[int]) -> list[int]:
        """Blocks of each device: at least one for each that was chosen."""
        devices = self._cluster.devices
        limits = {
            k: self._capacities[k][len(chosen) - position - 1] for position, k in enumerate(chosen)
        }
        blocks = [int(k in limits) for k in range(len(devices))]
        for _ in range(self._num_blocks - len(chosen)):
            least_slow = min(
                (k for k in chosen if blocks[k] < limits[k]),
                key=lambda k: self._seconds(devices[k], blocks[k] + 1),
            )
            blocks[least_slow] += 1
        return blocks

    def _none_holds_a_block(self) -> str:
        largest = max(self._cluster.devices, key=lambda device: device.memory_bytes or 0)
        window = classical_window(self._problem, self._cluster, 1)
        needed = self._needed(largest, 1, window)
        return (
            f"no device can hold a block: one needs {needed:.0f} bytes with {window} micro-batches in flight, and "
            f"the largest device, {largest.host_id}, may use {largest.memory_bytes}: raise its --memory-bytes, use more "
            "and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
        )


def _strongest(capacities: Sequence[Sequence[int]]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For each number of devices: the most blocks that so many can hold, and which devices those are.

    Args:
        capacities: `capacities[k][n - 1]` blocks fit on device k when n devices, from k on, take part.
    """
    strongest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for index in reversed(range(len(capacities))):
        for active in range(len(capacities) - index, 0, -1):
            held = capacities[index][active - 1]
            if not held or active - 1 not in strongest:
                continue
            behind, others = strongest[active - 1]
            if active not in strongest or held + behind >= strongest[active][0]:
                strongest[active] = (held + behind, (index, *others))
    return strongest
