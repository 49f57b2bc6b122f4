"""What is predicted of a cluster by a decision that was recorded."""

from typing import Any

import pytest

from collapipe.recorded_decisions import prediction_of, prediction_of_plan
from collapipe.v1.plan_pb2 import Plan, Stage

PLAN = Plan(cluster_index=1, stages=[Stage(host_id="a"), Stage(host_id="b")])


def decision(*host_ids: str, stash: float = 1.0, **more: Any) -> dict[str, Any]:
    stages = [{"host_id": host_id, "memory_bytes": 5.0} for host_id in host_ids]
    problem = {"model": {"block_stash_bytes": stash}}
    clusters = [{"stages": []}, {"push_seconds": 2.0, "stages": stages}]
    return {"question": {"problem": problem}, "prediction": {"clusters": clusters}, **more}


def test_prediction_is_that_of_the_hosts_of_the_plan() -> None:
    found = prediction_of_plan(decision("a", "b"), PLAN)
    assert found["push_seconds"] == 2.0
    assert [stage["memory_bytes"] for stage in found["stages"]] == [5.0, 5.0]


@pytest.mark.parametrize(
    "recorded", [decision("a", "c"), decision("a"), decision("a", "b", guessed=["a"]), {}]
)
def test_cluster_with_another_plan_or_guessed_speeds_is_not_predicted(
    recorded: dict[str, Any],
) -> None:
    assert prediction_of_plan(recorded, PLAN) == {}
    assert not (recorded.get("guessed") and prediction_of(recorded))


def test_nothing_is_predicted_without_a_decision() -> None:
    assert prediction_of_plan({}, Plan()) == {}


def test_memory_without_measured_activations_is_left_out() -> None:
    found = prediction_of_plan(decision("a", "b", stash=0.0), PLAN)
    assert [stage["memory_bytes"] for stage in found["stages"]] == [None, None]
    assert found["push_seconds"] == 2.0
