"""What clients are told when the plans of a round differ from those of the round before."""

from dataclasses import replace

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.scheduler.decisions import Question, RoundDecision, decide
from collapipe.scheduler.plan_change import say_change
from collapipe.scheduler.round_problem import build_problem

from .jobs import SIZES, hosts, job, knowledge


def plan(
    first: int, second: int, *, other: str = "device-1", micro_batches: int = 4
) -> ClusterPlan:
    """Divides six blocks among two devices."""
    ranges = [(0, 1), (1, 1 + first), (1 + first, 1 + first + second), (7, 8)]
    names = ["control-unit", "device-0", other, "edge-server"]
    stages = tuple(StagePlan(name, *units, 2) for name, units in zip(names, ranges, strict=True))
    return ClusterPlan(stages, micro_batches, (LinkPlan(),) * 3)


def decision(before: ClusterPlan | None, after: ClusterPlan) -> RoundDecision:
    problem = build_problem(job(), SIZES, hosts(), knowledge(hosts()), round_index=1)
    clusters = (replace(problem.clusters[0], previous=before),)
    decided = decide(Question("dssra", (), 0.05, replace(problem, clusters=clusters)))
    return replace(decided, plans=(after,))


def test_moved_blocks_are_named_with_the_predicted_seconds() -> None:
    said = say_change(decision(plan(4, 2), plan(2, 4)))
    assert said.startswith("device-1 takes blocks 2-3 from device-0 (predicted: ")
    assert said.endswith(" s without this change)")
    assert say_change(decision(plan(3, 3), plan(2, 4))).startswith("device-1 takes block 2 from")


def test_same_plan_and_first_plan_are_no_change() -> None:
    assert say_change(decision(plan(3, 3), plan(3, 3))) == ""
    assert say_change(decision(None, plan(3, 3))) == ""


def test_host_that_is_gone_is_the_reason() -> None:
    said = say_change(decision(plan(3, 3, other="device-9"), plan(3, 3)))
    assert said == "device-1 takes blocks 3-5 from device-9 (device-9 takes no part now)"


def test_other_numbers_of_micro_batches_are_a_change() -> None:
    said = say_change(decision(plan(3, 3), plan(3, 3, micro_batches=8)))
    assert said.startswith("8 micro-batches instead of 4 (predicted: ")


def test_predictions_that_nobody_measured_are_not_told() -> None:
    decided = decision(plan(4, 2), plan(2, 4))
    guessed = replace(decided, guessed=("device-0",))
    assert say_change(guessed).endswith("(speeds or links are not measured yet)")
