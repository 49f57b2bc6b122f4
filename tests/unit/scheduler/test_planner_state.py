import json
import logging
import math
from typing import Any

import pytest

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.scheduler.knowledge import LinkKnowledge
from collapipe.scheduler.planner_state import PlannerState, host_ids
from collapipe.telemetry.estimates import Estimates, HostEstimate

from .jobs import hosts, knowledge

PLAN = ClusterPlan(
    stages=(StagePlan("control-unit", 0, 1, 2), StagePlan("device-0", 1, 7, 1)),
    num_micro_batches=4,
    links=(LinkPlan(share=math.inf),),
)


def make_state() -> PlannerState:
    taking_part = hosts()
    known = knowledge(taking_part)
    known.links["device-0>device-1"] = LinkKnowledge(gain=1e-9, gather_bps=2e6)
    known.update(
        Estimates(end=0.0, hosts={"device-0": HostEstimate(seconds_per_sample=0.5)}), [], {}
    )
    known.update_fixed_seconds(0.5)
    return PlannerState(
        strategy="dssra",
        host_ids=host_ids(taking_part),
        knowledge=known,
        current_plans=(PLAN,),
    )


def stored(state: PlannerState) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(state.model_dump(mode="json")))
    return document


def test_state_survives_a_file_unchanged() -> None:
    state = make_state()
    assert math.isinf(state.knowledge.default_gather_bps)
    assert PlannerState.read(stored(state)) == state


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"knowledge": {"hosts": 3}}, "knowledge.hosts"),
        ({"current_plans": [{"stages": 3}]}, "current_plans"),
        ({"strategy": None}, "strategy"),
    ],
)
def test_damaged_state_is_ignored_with_a_warning(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert PlannerState.read(stored(make_state()) | change) is None
    assert reason in caplog.text


def test_state_of_an_older_version_is_ignored_with_a_warning_that_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = {"strategy": "dssra", "hosts": [], "knowledge": {}, "in_force": None}
    with caplog.at_level(logging.WARNING):
        assert PlannerState.read(older) is None
    assert "format version 1" in caplog.text
