"""Random messages and bytes, in the short form of `python -m benchmarks.fuzz`."""

from pathlib import Path

import pytest
from benchmarks.fuzz import fuzz_readers, fuzz_services

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(400)
def test_random_messages_stop_neither_a_service_nor_the_job_beside_it(tmp_path: Path) -> None:
    outcomes = dict(fuzz_services(tmp_path, messages=8_000, seconds=90, seed="short"))
    assert {name: outcome.faults for name, outcome in outcomes.items() if outcome.faults} == {}
    assert outcomes.pop("the job beside").codes["rounds meanwhile"] > 0
    called = {name: outcome for name, outcome in outcomes.items() if " as " in name}
    assert len(called) > 50
    assert [name for name, outcome in called.items() if not outcome.messages] == []


def test_readers_of_random_bytes_raise_only_errors_of_the_project(tmp_path: Path) -> None:
    outcomes = fuzz_readers(tmp_path, messages=20_000, seed="short")
    assert {name: outcome.faults for name, outcome in outcomes.items() if outcome.faults} == {}
    for outcome in outcomes.values():
        assert set(outcome.codes) != {"accepted"}
