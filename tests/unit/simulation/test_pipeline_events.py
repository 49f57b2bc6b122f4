"""The event simulation against counts by hand, and against a slow simulation with the rule of real stages."""

import random

import pytest

from collapipe.simulation.pipeline_events import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)
from collapipe.stage_runtime.action_order import Progress

_FREE = SimulatedLink(0.0, 0.0)


def _stages(*seconds: tuple[float, float], in_flight: int = 99) -> list[SimulatedStage]:
    return [
        SimulatedStage(forward, backward, in_flight, f"host-{k}")
        for k, (forward, backward) in enumerate(seconds)
    ]


def _seconds(pipeline: SimulatedPipeline) -> float:
    (run,) = simulate([pipeline])
    return run.seconds


def test_one_stage_takes_the_sum_of_its_passes() -> None:
    assert _seconds(SimulatedPipeline(_stages((1.0, 2.0)), [], 1)) == 3.0
    assert _seconds(SimulatedPipeline(_stages((1.0, 2.0)), [], 5, num_steps=2)) == 30.0


def test_one_micro_batch_takes_the_sum_of_all_passes_and_transfers() -> None:
    link = SimulatedLink(0.5, 0.25, latency_seconds=0.125)
    pipeline = SimulatedPipeline(_stages((1.0, 2.0), (3.0, 4.0)), [link], 1, step_seconds=10.0)
    assert _seconds(pipeline) == 1 + 2 + 3 + 4 + 0.5 + 0.25 + 2 * 0.125 + 10


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 8, 16])
def test_equal_stages_take_the_classical_time(num_stages: int, num_micro_batches: int) -> None:
    stages = [SimulatedStage(1.0, 2.0, num_stages - k, f"host-{k}") for k in range(num_stages)]
    (run,) = simulate([SimulatedPipeline(stages, [_FREE] * (num_stages - 1), num_micro_batches)])
    assert run.seconds == (num_micro_batches + num_stages - 1) * 3
    assert run.peak_in_flight == tuple(
        min(num_stages - k, num_micro_batches) for k in range(num_stages)
    )


def test_slow_link_sets_the_pace_and_its_latency_does_not() -> None:
    # One forward pass, 4 transfers of 5 s, latency, the head's 2 + 3 s, a transfer of 1 s, latency, a backward pass.
    link = SimulatedLink(5.0, 1.0, latency_seconds=100.0)
    pipeline = SimulatedPipeline(_stages((1.0, 1.0), (2.0, 3.0)), [link], 4)
    assert _seconds(pipeline) == 1 + 4 * 5 + 100 + 5 + 1 + 100 + 1


def test_half_duplex_link_carries_one_direction_at_a_time() -> None:
    stages = _stages((0.0, 0.0), (0.0, 0.0))
    full = SimulatedPipeline(stages, [SimulatedLink(2.0, 2.0)], 4)
    half = SimulatedPipeline(stages, [SimulatedLink(2.0, 2.0, half_duplex=True)], 4)
    assert _seconds(full) == 4 * 2 + 2
    assert _seconds(half) == 4 * 2 + 4 * 2


def test_window_of_one_runs_micro_batches_one_by_one() -> None:
    link = SimulatedLink(1.0, 1.0, latency_seconds=0.5)
    stages = _stages((1.0, 2.0), (1.0, 2.0), in_flight=1)
    (run,) = simulate([SimulatedPipeline(stages, [link], 6)])
    assert run.seconds == 6 * (6 + 3)
    assert run.peak_in_flight == (1, 1)


def test_gradients_of_weights_run_while_a_stage_waits() -> None:
    # Each gradient travels for 3 s. The first stage has nothing else to do meanwhile.
    whole = [SimulatedStage(1.0, 2.0, 9, "a"), SimulatedStage(1.0, 3.0, 1, "b")]
    split = [SimulatedStage(1.0, 2.0, 9, "a"), SimulatedStage(1.0, 1.0, 1, "b", 2.0)]
    link = SimulatedLink(0.0, 0.0, latency_seconds=3.0)
    assert _seconds(SimulatedPipeline(whole, [link], 1)) == 1 + 3 + 4 + 3 + 2
    assert _seconds(SimulatedPipeline(split, [link], 1)) == 1 + 3 + 2 + 3 + 2
    # They end after the last backward pass of the first stage, and the step waits for them.
    late = [SimulatedStage(1.0, 2.0, 9, "a"), SimulatedStage(1.0, 1.0, 1, "b", 20.0)]
    assert _seconds(SimulatedPipeline(late, [link], 1)) == 1 + 3 + 2 + 20


def test_deferred_gradients_count_in_the_window() -> None:
    stages = [SimulatedStage(1.0, 1.0, 9, "a"), SimulatedStage(1.0, 1.0, 2, "b", 5.0)]
    stages.append(SimulatedStage(0.0, 0.0, 1, "c"))
    (run,) = simulate([SimulatedPipeline(stages, [_FREE, _FREE], 4)])
    assert run.peak_in_flight[1] == 2
    assert run.seconds == 1 + 4 * 7


def test_heads_on_one_processor_take_turns() -> None:
    def pipeline(cluster: int, head: str) -> SimulatedPipeline:
        first = SimulatedStage(0.0, 0.0, 99, f"control-unit-{cluster}")
        return SimulatedPipeline([first, SimulatedStage(1.0, 2.0, 1, head)], [_FREE], 4)

    together = simulate([pipeline(cluster, "edge-server") for cluster in range(3)])
    apart = simulate([pipeline(cluster, f"server-{cluster}") for cluster in range(3)])
    assert max(run.seconds for run in together) == 3 * 4 * 3
    assert [run.seconds for run in apart] == [12.0] * 3


def test_link_with_infinite_seconds_takes_infinite_time() -> None:
    pipeline = SimulatedPipeline(
        _stages((1.0, 1.0), (1.0, 1.0)), [SimulatedLink(float("inf"), 1.0)], 2
    )
    assert _seconds(pipeline) == float("inf")


@pytest.mark.parametrize("seed", range(40))
def test_random_pipeline_takes_as_long_as_with_the_rule_of_real_stages(seed: int) -> None:
    rng = random.Random(seed)
    num_stages, num_micro_batches = rng.randint(2, 6), rng.randint(1, 9)
    # Random times, so that no two events happen at the same time.
    stages = [
        SimulatedStage(
            rng.random(),
            2 * rng.random(),
            rng.randint(1, 6),
            f"host-{k}",
            rng.choice([0.0, rng.random()]),
        )
        for k in range(num_stages)
    ]
    links = [
        SimulatedLink(rng.random(), rng.random(), rng.random(), rng.random() < 0.5)
        for _ in range(num_stages - 1)
    ]
    pipeline = SimulatedPipeline(stages, links, num_micro_batches)
    assert _seconds(pipeline) == pytest.approx(_slowly(pipeline), rel=1e-12)


def _slowly(pipeline: SimulatedPipeline) -> float:
    """Simulates a pipeline with a search over all possible next actions: the earliest one comes first."""
    stages, last = pipeline.stages, len(pipeline.stages) - 1
    progress = [Progress(pipeline.num_micro_batches, stage.in_flight) for stage in stages]
    idle_at = [0.0] * len(stages)
    free_at = {(k, way): 0.0 for k in range(last) for way in ("up", "down")}
    activations = [[0.0] * pipeline.num_micro_batches] + [[] for _ in range(last)]
    gradients: list[list[float]] = [[] for _ in stages]
    # (time, link, direction) of frames that wait for a link
    requests: list[tuple[float, int, str]] = []

    def next_action(k: int) -> tuple[float, int] | None:
        """Returns when the next action of a stage begins, and its rank: 1 is forward, 3 is deferred gradients."""
        own, choices = progress[k], []
        backward_rank = 2 if own.prefers_forward else 0
        if own.may_run_backward and k != last and len(gradients[k]) > own.backwards:
            choices.append((max(idle_at[k], gradients[k][own.backwards]), backward_rank))
        if own.may_run_forward and len(activations[k]) > own.forwards:
            choices.append((max(idle_at[k], activations[k][own.forwards]), 1))
        if own.has_deferred:
            choices.append((idle_at[k], 3))
        return min(choices) if choices else None

    while not all(own.done for own in progress):
        begins = [(found[0], k, found[1]) for k in range(last + 1) if (found := next_action(k))]
        if requests and (not begins or min(requests)[0] <= min(begins)[0]):
            now, k, way = min(requests)
            requests.remove((now, k, way))
            link = pipeline.links[k]
            server = (k, "up" if link.half_duplex else way)
            seconds = link.forward_seconds if way == "up" else link.backward_seconds
            free_at[server] = max(now, free_at[server]) + seconds
            arrivals = activations[k + 1] if way == "up" else gradients[k]
            arrivals.append(free_at[server] + link.latency_seconds)
            continue
        now, k, rank = min(begins)
        stage, own = stages[k], progress[k]
        if rank == 3:
            own.released_one()
            idle_at[k] = now + stage.weights_seconds
        elif rank != 1 or k == last:
            seconds = stage.backward_seconds + (stage.forward_seconds if rank == 1 else 0.0)
            if rank == 1:
                own.ran_forward()
            own.ran_backward()
            if not stage.weights_seconds:
                own.released_one()
            idle_at[k] = now + seconds
            if k:
                requests.append((idle_at[k], k - 1, "down"))
        else:
            own.ran_forward()
            idle_at[k] = now + stage.forward_seconds
            requests.append((idle_at[k], k, "up"))
    return max(idle_at)
