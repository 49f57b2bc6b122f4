"""The strategies that fit segments to speed and memory: `proportional`, `titanic` (TITANIC) and `titanic_best`.

All minimise the time of the slowest segment. `titanic` first minimises the number of devices. `titanic_best`
tries every number of devices and keeps the one with the shortest predicted round. The window of a device
depends on how many devices follow it, and so do the blocks that its memory can hold. Therefore two steps are
needed:

1. Choose the devices that take part. Dynamic programming finds the choice that can hold the most blocks.
2. Cut the blocks among them. Dynamic programming finds the cut whose times, in descending order, are the smallest.
   The device that registered first gets the most blocks of a tie.

With half blocks, what fits on a device depends on the kind of its last block. If fewer devices would do, a larger
number of devices may have a faster choice than that of step 1.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from collapipe.allocation.round_model.in_flight_windows import classical_window
from collapipe.allocation.round_model.prediction import predict, stage_memory_bytes
from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem, StagePlan
from collapipe.allocation.strategies.complete_plan import (
    Stages,
    complete,
    num_micro_batches,
    num_slices,
    place_blocks,
)
from collapipe.byte_sizes import say_bytes
from collapipe.errors import InfeasibleError


def place_proportionally(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Minimises the time of the slowest segment, and then the number of devices, as each device adds a link.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    balance = _Balance(problem, cluster)
    seconds, count = min((seconds, count) for count, seconds in balance.shortest.items())
    placed = balance.place(count, seconds)
    assert (
        placed is not None
    )  # Fewer devices would not do, so each of them holds what step 1 has given it.
    return placed


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
    for count, seconds in sorted(balance.shortest.items()):
        placed = balance.place(count, seconds)
        if placed is not None:
            yield placed


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
        self._ends = range(problem.model.period)
        self._num_slices = num_slices(cluster)
        size = problem.mini_batch / (self._num_micro_batches * self._num_slices)
        # _seconds[k][e][d - 1] is the time of d blocks that end before block e (modulo the period) on device k.
        self._seconds = [
            [
                [
                    device.compute_seconds(
                        size,
                        problem.model.work(*self._units(end, number)),
                        recompute=problem.recomputes_by_default,
                    )
                    for number in self._numbers(end)
                ]
                for end in self._ends
            ]
            for device in devices
        ]
        # _capacities[k][n - 1][e] blocks that end before block e (modulo the period) fit on device k if n devices, from
        # device k on, take part.
        self._capacities = [
            [
                [self._capacity(device, count, end) for end in self._ends]
                for count in range(1, len(devices) - index + 1)
            ]
            for index, device in enumerate(devices)
        ]
        most = max(blocks for blocks, _ in self._most_blocks(self._capacities).values())
        if most == 0:
            raise InfeasibleError(self._explain_no_block_fits())
        if most < self._num_blocks:
            raise InfeasibleError(
                f"the {len(devices)} devices can hold {most} of {self._num_blocks} blocks: add devices or memory, "
                "use more and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
            )
        self.shortest: dict[int, float] = {}
        """The shortest time of the slowest segment on each number of devices that can hold the model."""
        # With half blocks, devices that may take longer may need fewer others. So all times are tried.
        for seconds in sorted({t for rows in self._seconds for times in rows for t in times}):
            held = self._most_blocks(self._capacities_within(seconds))
            for count, (blocks, _) in held.items():
                if count <= self._num_blocks <= blocks:
                    self.shortest.setdefault(count, seconds)

    def place(self, count: int, seconds: float) -> Stages | None:
        """Places the model on `count` devices, such that no segment takes longer than `seconds`.

        Returns `None` if one of them would get a kind of block that does not fit.
        """
        capacities = self._capacities_within(seconds)
        blocks = self._cut(self._most_blocks(capacities)[count][1], capacities)
        if blocks is None:
            return None
        return place_blocks(self._problem, self._cluster, blocks)

    def _capacities_within(self, seconds: float) -> list[list[list[int]]]:
        """Returns `_capacities` without the blocks that take longer."""
        return [
            [
                [min(own, bisect_right(t, seconds)) for own, t in zip(row, times, strict=True)]
                for row in rows
            ]
            for rows, times in zip(self._capacities, self._seconds, strict=True)
        ]

    def _most_blocks(
        self, capacities: Sequence[Sequence[Sequence[int]]]
    ) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Returns the most last blocks that each number of devices can hold, and the devices that hold them."""
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for index in reversed(range(len(capacities))):
            for count in range(len(capacities) - index, 0, -1):
                if count - 1 not in best:
                    continue
                behind, others = best[count - 1]
                own = capacities[index][count - 1][(self._num_blocks - behind) % len(self._ends)]
                if own and (count not in best or own + behind >= best[count][0]):
                    best[count] = (own + behind, (index, *others))
        return best

    def _units(self, end: int, num_blocks: int) -> tuple[int, int]:
        """Returns units like those of a number of blocks that end before block `end` (modulo the period)."""
        start = 1 + (end - num_blocks) % len(self._ends)
        return start, start + num_blocks

    def _numbers(self, end: int) -> list[int]:
        """Returns the numbers of blocks that can end before block `end` (modulo the period)."""
        head = self._num_blocks + 1
        return [n for n in range(1, head) if self._units(end, n)[1] <= head]

    def _capacity(self, device: Host, count: int, end: int) -> int:
        """Returns the blocks that fit on a device if `count` devices, from this one on, take part."""
        if device.memory_bytes is None:
            return self._num_blocks
        fits = [
            number
            for number in self._numbers(end)
            if self._needed_bytes(device, count, end, number) <= device.memory_bytes
        ]
        return max(fits, default=0)

    def _needed_bytes(self, device: Host, count: int, end: int, num_blocks: int) -> float:
        window = classical_window(self._problem, self._num_micro_batches, count)
        recompute = self._problem.recomputes_by_default
        stage = StagePlan(device.host_id, *self._units(end, num_blocks), window, recompute)
        return stage_memory_bytes(
            self._problem, device, stage, self._num_micro_batches, self._num_slices
        )

    def _cut(
        self, chosen: Sequence[int], capacities: Sequence[Sequence[Sequence[int]]]
    ) -> list[int] | None:
        """Returns the blocks of each device: at least 1 for each chosen device, 0 for the others."""
        # For each first block of the devices from one on: their times in descending order, and their blocks.
        cuts: dict[int, tuple[list[float], list[int]]] = {self._num_blocks: ([], [])}
        for count, k in enumerate(reversed(chosen), 1):
            behind, cuts = cuts, {}
            for stop in sorted(behind, reverse=True):
                times, blocks = behind[stop]
                end = stop % len(self._ends)
                for own in range(1, min(capacities[k][count - 1][end], stop) + 1):
                    slowest = sorted([*times, self._seconds[k][end][own - 1]], reverse=True)
                    start = stop - own
                    if start not in cuts or slowest < cuts[start][0]:
                        cuts[start] = (slowest, [own, *blocks])
        if 0 not in cuts:
            return None
        by_device = dict(zip(chosen, cuts[0][1], strict=True))
        return [by_device.get(k, 0) for k in range(len(self._cluster.devices))]

    def _explain_no_block_fits(self) -> str:
        largest = max(self._cluster.devices, key=lambda device: device.memory_bytes or 0)
        window = classical_window(self._problem, self._num_micro_batches, 1)
        needed = min(self._needed_bytes(largest, 1, end, 1) for end in self._ends)
        return (
            f"no device can hold a block: one needs {say_bytes(needed)} with {window} "
            f"micro-batches in flight, and the largest device, {largest.host_id}, may use {say_bytes(largest.memory_bytes or 0)}: raise "
            "its --memory-bytes, use more and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
        )
