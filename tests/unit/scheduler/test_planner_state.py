import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.documents import write_document
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.knowledge import LinkKnowledge
from collapipe.scheduler.planner_state import PlannerState
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
    known.links["device-0>device-1"] = LinkKnowledge(gain=1e-9, weights_bps=2e6)
    known.update(
        Estimates(end=0.0, hosts={"device-0": HostEstimate(seconds_per_sample=0.5)}), [], {}
    )
    known.update_fixed_seconds(0.5)
    return PlannerState(
        strategy="dssra",
        knowledge=known,
        current_plans=(PLAN,),
    )


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


def test_planner_state_survives_a_restart(tmp_path: Path, store: JobStore) -> None:
    assert store.planner_state("job") is None
    state = make_state()
    store.save_planner_state("job", state)
    assert JobStore(tmp_path).planner_state("job") == state


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"knowledge": {"hosts": 3}}, "knowledge.hosts"),
        ({"current_plans": [{"stages": 3}]}, "current_plans"),
        ({"strategy": None}, "strategy"),
        ({"version": 1}, "format version 1, but this scheduler reads version 5"),
    ],
)
def test_state_that_cannot_be_used_is_ignored_with_a_warning(
    store: JobStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    reason: str,
) -> None:
    store.save_planner_state("job", make_state())
    path = tmp_path / "jobs" / "job" / "planner.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | change), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert store.planner_state("job") is None
    assert str(path) in caplog.text
    assert reason in caplog.text


def test_state_without_a_version_is_refused_as_version_1(
    store: JobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs" / "job" / "planner.json"
    older = {"strategy": "dssra", "hosts": [], "knowledge": {}, "in_force": None}
    write_document(path, older)
    with caplog.at_level(logging.WARNING):
        assert store.planner_state("job") is None
    assert "format version 1" in caplog.text
