"""The strategies that fit segments to speed and memory: `proportional`, `titanic` (TITANIC) and `titanic_best`.

All minimise the time of the slowest segment. `titanic` first minimises the number of devices. `titanic_best`
tries every number of devices and keeps the one with the shortest predicted round. The window of a device
depends on how many devices follow it, and so do the blocks that its memory can hold. Therefore two steps are
needed:

1. Choose the devices that take part. Dynamic programming finds the choice that can hold the most blocks.
2. Give out the blocks one by one, each to the device that is then the least slow. This is optimal, because
   the time of a device only grows with its blocks. The device that registered first wins a tie.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from collapipe.allocation.round_model.in_flight_windows import classical_window
from collapipe.allocation.round_model.prediction import predict, stage_memory_bytes
from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem, StagePlan
from collapipe.allocation.strategies.complete_plan import (
    Stages,
    complete,
    num_micro_batches,
    place_blocks,
)
from collapipe.errors import InfeasibleError


def place_proportionally(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Minimises the time of the slowest segment, and then the number of devices, as each device adds a link.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    balance = _Balance(problem, cluster)
    seconds = balance.shortest()
    return balance.place(balance.device_counts(seconds)[0], seconds)


def place_on_the_fewest(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Minimises the number of devices, and then the time of the slowest segment.

    TITANIC states this as an integer program. For a given number of devices, the search for the shortest time
    of the slowest segment solves that program exactly.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    return next(_placements(problem, cluster))


def place_on_the_best_number(problem: RoundProblem) -> list[Stages]:
    """Chooses the number of devices of each cluster with the shortest predicted round.

    At first every cluster has its fewest devices. Then each cluster in turn takes the number of devices that
    gives the shortest round, while the other clusters keep theirs. Among such numbers, it takes the one that is
    fastest for itself, and then the smallest. So the prediction is never longer than that of `titanic`. If no
    clusters share a channel, the number of each cluster is the best one.

    Raises:
        InfeasibleError: A cluster has no devices, or their memory cannot hold the model.
    """
    options = [list(_placements(problem, cluster)) for cluster in problem.clusters]
    placed = [placements[0] for placements in options]
    for index, placements in enumerate(options):
        candidates = [[*placed[:index], one, *placed[index + 1 :]] for one in placements]
        placed = min(candidates, key=lambda stages: _predicted_seconds(problem, stages, index))
    return placed


def _predicted_seconds(
    problem: RoundProblem, placed: Sequence[Stages], index: int
) -> tuple[float, float]:
    """Returns the predicted time of the round, and of one cluster in it."""
    prediction = predict(problem, complete(problem, placed))
    return prediction.round_seconds, prediction.clusters[index].round_seconds


def _placements(problem: RoundProblem, cluster: ClusterProblem) -> Iterator[Stages]:
    """Yields the placement for each number of devices that can hold the model, the fewest first."""
    balance = _Balance(problem, cluster)
    for count in balance.device_counts(balance.times[-1]):
        yield balance.place(count, balance.shortest(count))


class _Balance:
    """Finds the devices that can run the model if no segment may take longer than a given time."""

    def __init__(self, problem: RoundProblem, cluster: ClusterProblem) -> None:
        self._problem = problem
        self._cluster = cluster
        self._num_blocks = problem.model.num_blocks
        self._num_micro_batches = num_micro_batches(cluster)
        devices = cluster.devices
        if not devices:
            raise InfeasibleError("the cluster has no devices: a pipeline needs at least 1")
        # _capacities[k][n - 1] blocks fit on device k if n devices, from device k on, take part.
        self._capacities = [
            [self._capacity(device, count) for count in range(1, len(devices) - index + 1)]
            for index, device in enumerate(devices)
        ]
        most = max(blocks for blocks, _ in _most_blocks(self._capacities).values())
        if most == 0:
            raise InfeasibleError(self._explain_no_block_fits())
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
        """Every time that a segment can take, ascending."""

    def device_counts(self, seconds: float) -> list[int]:
        """Returns how many devices can keep each segment within a time: all such numbers, ascending."""
        return sorted(
            count
            for count, (blocks, _) in self._most_blocks_within(seconds).items()
            if count <= self._num_blocks <= blocks
        )

    def shortest(self, count: int | None = None) -> float:
        """Returns the shortest time of the slowest segment on `count` devices. `None` means any number."""

        def feasible(seconds: float) -> bool:
            counts = self.device_counts(seconds)
            return bool(counts) if count is None else count in counts

        return self.times[bisect_left(self.times, True, key=feasible)]

    def place(self, count: int, seconds: float) -> Stages:
        """Places the model on `count` devices, such that no segment takes longer than `seconds`."""
        chosen = self._most_blocks_within(seconds)[count][1]
        return place_blocks(self._problem, self._cluster, self._give_out_blocks(chosen))

    def _most_blocks_within(self, seconds: float) -> dict[int, tuple[int, tuple[int, ...]]]:
        capacities = []
        for device, row in zip(self._cluster.devices, self._capacities, strict=True):
            numbers = range(1, self._num_blocks + 1)
            in_time = sum(self._seconds(device, number) <= seconds for number in numbers)
            capacities.append([min(capacity, in_time) for capacity in row])
        return _most_blocks(capacities)

    def _seconds(self, device: Host, num_blocks: int) -> float:
        size = self._problem.mini_batch / self._num_micro_batches
        return device.compute_seconds(size, num_blocks)

    def _capacity(self, device: Host, count: int) -> int:
        """Returns the blocks that fit on a device if `count` devices, from this one on, take part."""
        if device.memory_bytes is None:
            return self._num_blocks
        fits = [
            number
            for number in range(1, self._num_blocks + 1)
            if self._needed_bytes(device, number, count) <= device.memory_bytes
        ]
        return max(fits, default=0)

    def _needed_bytes(self, device: Host, num_blocks: int, count: int) -> float:
        window = classical_window(self._problem, self._num_micro_batches, count)
        stage = StagePlan(device.host_id, 1, num_blocks + 1, window)
        return stage_memory_bytes(self._problem, device, stage, self._num_micro_batches)

    def _give_out_blocks(self, chosen: Sequence[int]) -> list[int]:
        """Returns the blocks of each device: at least 1 for each chosen device, 0 for the others."""
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

    def _explain_no_block_fits(self) -> str:
        largest = max(self._cluster.devices, key=lambda device: device.memory_bytes or 0)
        window = classical_window(self._problem, self._num_micro_batches, 1)
        return (
            f"no device can hold a block: one needs {self._needed_bytes(largest, 1, 1):.0f} bytes with {window} "
            f"micro-batches in flight, and the largest device, {largest.host_id}, may use {largest.memory_bytes}: raise "
            "its --memory-bytes, use more and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
        )


def _most_blocks(capacities: Sequence[Sequence[int]]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Returns the most blocks that each number of devices can hold, and the devices that hold them.

    `capacities[k][n - 1]` blocks fit on device k if n devices, from device k on, take part.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for index in reversed(range(len(capacities))):
        for count in range(len(capacities) - index, 0, -1):
            own = capacities[index][count - 1]
            if not own or count - 1 not in best:
                continue
            behind, others = best[count - 1]
            if count not in best or own + behind >= best[count][0]:
                best[count] = (own + behind, (index, *others))
    return best
