import math
from typing import Any

import pytest

from collapipe.allocation import RoundPlan, RoundProblem, decide_round, predict
from collapipe.allocation.round_model.weights_transfer import moved_states
from collapipe.simulation import Scenario
from collapipe.simulation.outcome import run_round
from collapipe.simulation.records import RoundRecord
from collapipe.simulation.rounds import num_rounds, run_scenario, run_strategy
from collapipe.simulation.simulated_system import SimulatedSystem

from .scenarios import RADIO, document, scenario


def _with_memory(*gigabytes: float) -> list[dict[str, object]]:
    return [{"devices": [{"gigaflops": 10.0, "memory_gb": memory} for memory in gigabytes]}]


def test_every_round_has_a_record() -> None:
    run = run_strategy(scenario(rounds=4), "pipeline", 0)
    assert [record.round_index for record in run.rounds] == [0, 1, 2, 3]
    for record in run.rounds:
        assert record.feasible
        assert record.delay_seconds == pytest.approx(record.predicted_seconds, rel=0.2)
        assert (record.num_segments, record.moved_units) == (2, 0)
        assert 0 < record.bubble_ratio < 1
    # Each device runs 6 blocks for 2 steps of 8 samples. On wires, sending takes no energy.
    work = [6 * 16 * device.seconds_per_sample for device in SimulatedSystem(scenario(), 0).devices]
    joules = [10.0 * work[0], 5.0 * work[1]]
    assert [device.mean_energy_joules for device in run.devices] == pytest.approx(joules)
    assert [device.blocks for device in run.devices] == [24, 24]


def test_changed_plans_run_and_are_predicted() -> None:
    manual = [[3, 9]]

    def change(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
        return decide_round(problem, "manual", segments=manual).plans

    run = run_strategy(scenario(), "pipeline", 0, change=change)
    assert [device.blocks for device in run.devices] == [9, 27]
    for record in run.rounds[1:]:  # The first one has no rates of weights that fit its plan.
        assert record.predicted_seconds == pytest.approx(record.delay_seconds, rel=0.2)


def test_same_seed_gives_the_same_rounds() -> None:
    config = scenario(channel=RADIO)
    first, again, other = (run_strategy(config, "pipeline", seed) for seed in (1, 1, 2))
    delays = [[record.delay_seconds for record in run.rounds] for run in (first, again, other)]
    assert delays[0] == delays[1] != delays[2]
    assert len(set(delays[0])) == 3  # because the channel fades


def test_baseline_uses_the_fastest_number_of_micro_batches() -> None:
    def run(*micro_batches: int) -> RoundRecord:
        training = {"mini_batch": 32, "local_steps": 1, "micro_batches": micro_batches}
        return run_strategy(scenario(training=training, rounds=1), "pipeline", 0).rounds[0]

    seconds = {run(m).delay_seconds: m for m in (1, 4, 32)}
    assert len(seconds) == 3
    best = run(1, 4, 32)
    assert (best.delay_seconds, best.num_micro_batches) == min(seconds.items())


def test_baseline_ignores_numbers_of_micro_batches_that_do_not_fit_memory() -> None:
    # With 1 large micro-batch, the stash of 12 blocks does not fit into 2.3 GB.
    training = {"mini_batch": 64, "local_steps": 1, "micro_batches": [1, 64]}
    config = scenario(
        training=training,
        clusters=_with_memory(2.3),
        model={"name": "bert-base", "sequence_length": 128},
    )
    (record, *_) = run_strategy(config, "pipeline", 0).rounds
    assert record.feasible
    assert record.num_micro_batches == 64


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "num_rounds"),
    [
        ("dssra", [4], 3),
        ("dssra", [2, 4], 3),
        # A baseline chooses between two numbers of micro-batches before the first round.
        ("pipeline", [2, 4], 1),
        ("titanic", [2, 4], 1),
        ("titanic_best", [2, 4], 1),
        ("vanilla_fl", [2, 4], 1),
        ("proportional", [2, 4], 1),
    ],
)
def test_strategy_without_a_plan_is_recorded_with_its_reason(
    strategy: str, micro_batches: list[int], num_rounds: int
) -> None:
    training = {"mini_batch": 8, "micro_batches": micro_batches}
    small = scenario(training=training, clusters=_with_memory(0.5, 0.5))
    run = run_strategy(small, strategy, 0)
    assert len(run.rounds) == num_rounds
    for record in run.rounds:
        assert not record.feasible
        assert record.reason
        assert record.delay_seconds == 0.0
    assert [device.num_rounds for device in run.devices] == [0, 0]


def test_backlog_grows_while_energy_is_over_budget() -> None:
    clusters = document()["clusters"]
    clusters[0]["devices"][0]["energy_budget_joules"] = 1.0
    run = run_strategy(scenario(clusters=clusters, rounds=3), "pipeline", 0)
    over = run.rounds[0].energy_over_budget_max
    assert over > 1
    backlogs = [record.backlog_max for record in run.rounds]
    assert backlogs == pytest.approx([k * (over - 1) for k in (1, 2, 3)])
    assert run.devices[0].backlog == backlogs[-1]
    # The penalty is the same in the last two rounds. The drift is the backlog times energy over budget.
    drift = [record.objective for record in run.rounds]
    assert drift[2] - drift[1] == pytest.approx((over - 1) * over)


@pytest.mark.parametrize("strategy", ["dssra", "proportional", "titanic_best"])
def test_absent_devices_are_in_no_plan(strategy: str) -> None:
    config = scenario(
        clusters=[{"devices": [{"gigaflops": 40.0}, {"gigaflops": 10.0, "count": 3}]}],
        rounds=12,
        world={"absence": 0.5, "absence_rounds": 2},
        schedule={"hysteresis": 0.0},
    )
    system = SimulatedSystem(config, 0)
    offered: list[set[str]] = []

    def record(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
        (cluster,), (plan,) = problem.clusters, plans
        offered.append({device.host_id for device in cluster.devices})
        assert {stage.host_id for stage in plan.stages} <= set(cluster.hosts)
        return plans

    run = run_strategy(config, strategy, 0, change=record)
    assert all(record.feasible for record in run.rounds)
    there = [
        {host.host_id for host, here in zip(system.hosts, drawn.present, strict=True) if here}
        - {"control-unit-0", "edge-server"}
        for drawn in map(system.draw, range(12))
    ]
    assert offered == there
    assert len(set(map(frozenset, there))) > 2
    assert sum(record.moved_units for record in run.rounds) > 0


def test_blocks_of_an_absent_device_come_from_the_edge_server() -> None:
    system = SimulatedSystem(scenario(), 0)
    drawn = system.draw(0)
    options = {"micro_batch_options": (4,)}
    before = system.problem(drawn, **options)
    previous = decide_round(before, "manual", segments=[[6, 6]]).plans
    rest = system.without(drawn, ["device-0-1"])
    gone = system.problem(rest, previous=previous, **options)
    plans = decide_round(gone, "proportional").plans
    num_bytes = gone.model.weights_bytes(7, 13) + gone.model.optimizer_bytes(7, 13)
    (cluster,) = gone.clusters
    moved = moved_states(gone, cluster, cluster.devices[0], 1, 13)
    assert list(moved) == [("edge-server", num_bytes)]
    stays = system.problem(drawn, previous=plans, **options)
    first, second = (run_round(problem, plans).seconds for problem in (gone, stays))
    assert first - second == pytest.approx(8 * num_bytes / 1e8)


def test_device_with_an_empty_battery_is_gone() -> None:
    clusters = document()["clusters"]
    per_round = run_strategy(scenario(), "pipeline", 0).devices[0].mean_energy_joules
    clusters[0]["devices"][0]["battery_joules"] = 2.5 * per_round
    run = run_strategy(scenario(clusters=clusters, rounds=5), "pipeline", 0)
    first, second = run.devices
    assert (first.empty_after, second.empty_after) == (3, None)
    assert first.energy_joules == pytest.approx(3 * per_round)
    assert [record.num_segments for record in run.rounds] == [2, 2, 2, 1, 1]
    # The mean of a round counts both devices.
    total = sum(2 * record.energy_joules_mean for record in run.rounds)
    assert first.energy_joules + second.energy_joules == pytest.approx(total)
    del clusters[0]["devices"][1]
    run = run_strategy(scenario(clusters=clusters, rounds=4), "pipeline", 0)
    assert [record.feasible for record in run.rounds] == [True, True, False, False]
    assert run.devices[0].empty_after == 2


@pytest.mark.parametrize("strategy", ["pipeline", "dssra"])
def test_prediction_contains_the_interference_of_its_plans(strategy: str) -> None:
    run, silent = (
        run_strategy(_near(document()["clusters"], interference), strategy, 0)
        for interference in ("clusters", "none")
    )
    for record, alone in zip(run.rounds, silent.rounds, strict=True):
        assert record.predicted_seconds / record.delay_seconds == pytest.approx(1.0, abs=0.2)
        assert record.delay_seconds > 1.2 * alone.delay_seconds


def _near(clusters: list[dict[str, Any]], interference: str) -> Scenario:
    """Returns two such clusters, so near that each hears the other one."""
    clusters[0]["count"] = 2
    near = RADIO | {"interference": interference, "fading": "none", "area_radius_m": 10}
    return scenario(channel=near, clusters=clusters)


def test_decision_is_the_best_answer_to_its_own_interference() -> None:
    # Energy has a price, so powers differ, and each decision changes the interference for the next one.
    clusters = document()["clusters"]
    for device in clusters[0]["devices"]:
        device["energy_budget_joules"] = 1.0
    settled: list[float] = []

    def record(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
        settled.append(predict(problem, plans).objective)
        return plans

    run = run_strategy(_near(clusters, "clusters"), "dssra", 0, change=record)
    assert run.rounds[-1].backlog_max > 0
    assert len(settled) > len(run.rounds)
    assert settled[-1] == pytest.approx(settled[-2], rel=2e-3)


def test_per_micro_batch_updates_run() -> None:
    training = document()["training"] | {"micro_batches": [4], "update_per": "micro_batch"}
    # On a shared wire all transfers take turns, so that (6) is exact.
    channel = {"kind": "wire", "rate_bps": 1e8, "shared_rate_bps": 1e8}
    for record in run_strategy(scenario(training=training, channel=channel), "pipeline", 0).rounds:
        assert record.predicted_seconds == pytest.approx(record.delay_seconds)


def test_scenario_runs_every_value_strategy_and_seed_in_order() -> None:
    config = scenario(
        seeds=[3, 5],
        rounds=1,
        strategies=["pipeline", "centralized"],
        sweep={"parameter": "bandwidth", "values": [1e8, 1e9]},
    )
    done: list[int] = []
    runs = run_scenario(config, on_rounds=done.append)
    assert [(run.value, run.strategy, run.seed) for run in runs] == [
        (value, strategy, seed)
        for value in (1e8, 1e9)
        for strategy in ("pipeline", "centralized")
        for seed in (3, 5)
    ]
    assert sum(done) == num_rounds(config) == 8
    assert all(math.isfinite(run.rounds[0].delay_seconds) for run in runs)
