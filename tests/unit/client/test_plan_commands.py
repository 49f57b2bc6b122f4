import json
import re
from typing import Any

import pytest

from collapipe.v1.job_pb2 import RoundSummary, StageReport
from collapipe.v1.plan_pb2 import LinkPlan, Plan, Stage
from collapipe.v1.scheduler_pb2 import ExplainDecisionResponse, JobStatus, RoundCommitted
from collapipe.v1.stage_pb2 import StageTimes
from collapipe.v1.tensor_pb2 import CODEC_BF16, CODEC_FP32, CODEC_INT8, Codec

from .commands import run
from .fake_services import FakeServices


def _strict(text: str) -> Any:
    """Reads JSON strictly, without Python's Infinity and NaN."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in {text}"))


@pytest.fixture
def one_job(fake: FakeServices) -> FakeServices:
    fake.jobs = [JobStatus(job_id="job-1", name="demo", num_rounds_committed=2)]
    return fake


def _run(fake: FakeServices, command: str, *options: str) -> str:
    return run("plan", command, *options, *fake.options).stdout


def test_explain_as_json_writes_null_for_infinity_and_nan(one_job: FakeServices) -> None:
    decision = {"share": float("inf"), "least": [float("-inf"), float("nan"), 1.5]}
    one_job.explanation = ExplainDecisionResponse(
        explanation="why\nso", decision_json=json.dumps(decision)
    )
    assert _strict(_run(one_job, "explain", "--json")) == {
        "round": 2,
        "explanation": ["why", "so"],
        "decision": {"share": None, "least": [None, None, 1.5]},
    }


@pytest.mark.parametrize(
    ("codec", "name"), [(CODEC_FP32, None), (CODEC_BF16, "bf16"), (CODEC_INT8, "int8")]
)
def test_show_names_the_lossy_codec_of_a_link(
    one_job: FakeServices, codec: Codec, name: str | None
) -> None:
    stages = [Stage(host_id="a", stop_unit=2), Stage(host_id="b", start_unit=2)]
    one_job.plans = [Plan(stages=stages, links=[LinkPlan(codec=codec)])]
    lines = _run(one_job, "show").splitlines()
    said = [line.strip() for line in lines if line.startswith("  link")]
    lossy = f", {name}" if name else ""
    assert said == [f"link a > b: rate not measured{lossy}"]


def test_show_tells_memory_seconds_rates_and_idle_devices_in_80_columns(
    one_job: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stages = [
        Stage(host_id="control-unit-0", stop_unit=1, in_flight=4),
        Stage(host_id="device-0-0", start_unit=1, stop_unit=7, in_flight=4),
        Stage(host_id="edge-server", start_unit=7, stop_unit=8, in_flight=1),
    ]
    one_job.plans = [Plan(stages=stages, links=[LinkPlan(), LinkPlan()], num_micro_batches=4)]
    devices = [{"host_id": f"device-0-{k}", "memory_bytes": 9 * 10**8} for k in range(2)]
    link = {"capacity_bps": 2e7, "round_trip_seconds": 0.012}
    computed = [
        {"host_id": stage.host_id, "compute_seconds": 0.25, "memory_bytes": 7.1e8}
        for stage in stages
    ]
    decision = {
        "question": {
            "problem": {
                "model": {"block_stash_bytes": 1e6},
                "clusters": [{"devices": devices, "links": {"control-unit-0>device-0-0": link}}],
            }
        },
        "prediction": {
            "full_round_seconds": 8.1,
            "clusters": [{"stages": computed, "links": [{"load_seconds": 0.125}] * 2}],
        },
    }
    report = StageReport(
        host_id="device-0-0", times=StageTimes(forward_seconds=2.0, backward_seconds=4.0)
    )
    measured = RoundCommitted(
        round_seconds=9.0, summaries=[RoundSummary(local_steps=5, stages=[report])]
    )
    one_job.explanation = ExplainDecisionResponse(
        decision_json=json.dumps(decision), committed=measured, idle={"device-0-1": "it is slow"}
    )
    lines = _run(one_job, "show").splitlines()
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80
    assert "predicted 8.10 s, measured 9.00 s" in lines[0]
    [device] = [line.split() for line in lines if line.startswith("device-0-0")]
    assert " ".join(device) == "device-0-0 blocks 0-5 4 710 of 900 1.000 s 1.200 s"
    assert (
        "  link control-unit-0 > device-0-0: 20 Mbit/s, round trip 12 ms, busy 0.500 s of a step"
        in lines
    )
    assert "  idle device-0-1: it is slow" in lines
    decision["guessed"] = ["device-0-0"]
    one_job.explanation.decision_json = json.dumps(decision)
    assert re.search("not predicted.* 9.00 s", _run(one_job, "show").splitlines()[0])


def test_explain_wraps_in_a_terminal_and_keeps_numbers_with_their_units(
    one_job: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    advice = f"  1. {'x' * 30} a better link of device-0-1: saves {'y' * 3} 1.234 s of 35.2 s (35%)"
    one_job.explanation = ExplainDecisionResponse(explanation=f"What would help\n{advice}")
    _, heading, *lines = _run(one_job, "explain").splitlines()
    assert heading == "What would help" and len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(map(str.strip, lines)) == advice.strip()
    assert lines[1].startswith("    1.234 s")
