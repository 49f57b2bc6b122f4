import json
from typing import Any

import pytest
from typer.testing import CliRunner

from collapipe.v1.plan_pb2 import LinkPlan, Plan, Stage
from collapipe.v1.scheduler_pb2 import ExplainDecisionResponse, JobStatus
from collapipe.v1.tensor_pb2 import CODEC_BF16, CODEC_FP32, CODEC_INT8, Codec
from collapipe_client.cli import app

from .conftest import FakeServices

_RUNNER = CliRunner()


def _strict(text: str) -> Any:
    """Reads JSON strictly, without Python's Infinity and NaN."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in {text}"))


@pytest.fixture
def one_job(fake: FakeServices) -> FakeServices:
    fake.jobs = [JobStatus(job_id="job-1", name="demo", num_rounds_committed=2)]
    return fake


def _run(fake: FakeServices, command: str, *options: str) -> str:
    result = _RUNNER.invoke(
        app, ["plan", command, *options, "--scheduler", fake.address, "--insecure"]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


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
