"""Random messages and bytes, in the short form of `python -m benchmarks.fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.fuzz import PARTS, ROOT, fuzz_readers, fuzz_services, memory_outcome
from fuzzing import KINDS


@pytest.mark.timeout(400)
def test_random_messages_stop_neither_a_service_nor_the_job_beside_it(tmp_path: Path) -> None:
    outcomes = dict(fuzz_services(tmp_path, messages=3_000, seconds=40, seed="short"))
    assert {name: outcome.faults for name, outcome in outcomes.items() if outcome.faults} == {}
    assert outcomes.pop("the job beside").codes["rounds meanwhile"] > 0
    called = {name: outcome for name, outcome in outcomes.items() if " as " in name}
    assert len(called) > 50
    assert {kind for outcome in called.values() for kind in outcome.kinds} == set(KINDS)


def test_memory_that_reaches_a_plateau_is_no_fault_and_a_slope_is_one() -> None:
    plateau = [100_000_000 + min(place, 3) * 30_000_000 for place in range(PARTS + 2)]
    assert memory_outcome(plateau).faults == []
    slope = [100_000_000 + place * 7_000_000 for place in range(PARTS + 2)]
    assert [reason for reason, _ in memory_outcome(slope).faults] == [
        "grew by 42 MB in the second half"
    ]
    assert [reason for reason, _ in memory_outcome([*plateau[:-1], None]).faults] == [
        "the process has ended"
    ]


def test_readers_of_random_bytes_raise_only_errors_of_the_project(tmp_path: Path) -> None:
    outcomes = fuzz_readers(tmp_path, messages=5_000, seed="short")
    assert {name: outcome.faults for name, outcome in outcomes.items() if outcome.faults} == {}
    for outcome in outcomes.values():
        assert set(outcome.codes) != {"accepted"}


@pytest.mark.parametrize(
    "reader",
    ["frames", "blobs", "documents", "telemetry pages", "answers of stages", "grants"],
)
def test_readers_of_inputs_that_reach_new_code_raise_only_errors_of_the_project(
    reader: str,
) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this machine")
    line = [sys.executable, "-m", "benchmarks.fuzz_readers", "--seconds", "3", "--reader", reader]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
