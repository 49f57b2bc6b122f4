"""Numbers of grants grow whatever the clock does, and old ones do not count."""

import json
import subprocess
from pathlib import Path

import pytest

from collapipe.errors import CorruptDataError
from collapipe.scheduler.deleted_jobs import DeletedJobs
from collapipe.scheduler.grant_numbers import GrantNumbers


class Clock:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def test_numbers_grow_although_the_clock_stands_or_goes_back(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    numbers = GrantNumbers(tmp_path, clock)
    taken = [numbers.next(), numbers.next()]
    clock.seconds = 900.0
    taken.append(numbers.next())
    assert taken == [1_000_000_000, 1_000_000_001, 1_000_000_002]


@pytest.mark.parametrize("seconds", [5.0, 1000.5, 2000.0])
def test_numbers_grow_over_a_restart(tmp_path: Path, seconds: float) -> None:
    clock = Clock(1000.0)
    earlier = GrantNumbers(tmp_path, clock)
    last = max(earlier.next() for _ in range(3))
    clock.seconds = 1050.0
    last = max(last, earlier.next())
    later = GrantNumbers(tmp_path, Clock(seconds))
    least = later.least(0)
    assert last < least <= later.next()


def test_numbers_go_on_without_a_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "grants.json.tmp").mkdir()
    numbers = GrantNumbers(tmp_path)
    assert numbers.next() < numbers.next()
    assert "the numbers of grants could not be stored" in caplog.text
    (tmp_path / "grants.json.tmp").rmdir()
    last = numbers.next()
    assert json.loads((tmp_path / "grants.json").read_text())["reserved"] > last


def test_only_grants_of_the_present_attempt_count_in_its_clusters(tmp_path: Path) -> None:
    numbers = GrantNumbers(tmp_path)
    unused = numbers.least(0)
    numbers.begin_attempt({0, 1})
    first = numbers.next()
    assert unused <= numbers.least(0) == numbers.least(1) < first < numbers.least(2)
    numbers.begin_attempt({0, 1})
    assert first < numbers.least(0) < numbers.next()
    last = numbers.next()
    numbers.end_attempt({0, 1})
    assert numbers.least(0) > last


def test_grant_of_an_attempt_that_begins_after_a_heartbeat_counts_at_once(tmp_path: Path) -> None:
    numbers = GrantNumbers(tmp_path)
    told = numbers.least(3)
    numbers.begin_attempt({3})
    assert numbers.next() >= told


def test_edge_server_takes_grants_of_all_present_attempts(tmp_path: Path) -> None:
    numbers = GrantNumbers(tmp_path)
    numbers.begin_attempt({0})
    of_older_job = numbers.next()
    numbers.begin_attempt({1})
    assert numbers.least(None) < of_older_job < numbers.least(1)
    numbers.end_attempt({0})
    assert numbers.least(None) == numbers.least(1)
    last = numbers.next()
    numbers.end_attempt({1})
    assert numbers.least(None) > last


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"reserved": "many"}', "\0" * 100])
def test_damaged_document_stops_the_scheduler_and_the_message_has_the_remedy(
    tmp_path: Path, content: str
) -> None:
    state = tmp_path / "the state"
    state.mkdir()
    last = GrantNumbers(state).next()
    (state / "grants.json").write_text(content)
    with pytest.raises(CorruptDataError, match="grants.json is damaged.*old grants") as refused:
        GrantNumbers(state)
    command = str(refused.value).split("`")[-2]
    subprocess.run(["sh", "-c", command], check=True)  # What a person would type.
    day = 86_400_000_000
    assert GrantNumbers(state).next() > last + day / 2


def test_old_grants_do_not_count_without_a_document(tmp_path: Path) -> None:
    earlier = GrantNumbers(tmp_path, Clock(1000.0)).next()
    (tmp_path / "grants.json").unlink()
    assert earlier < GrantNumbers(tmp_path, Clock(1001.0)).least(0)


@pytest.mark.parametrize("content", ["", "{}", '{"num_deletions": 1, "job_ids": "a"}'])
def test_damaged_list_of_deleted_jobs_says_what_its_loss_means(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "deleted.json").write_text(content)
    with pytest.raises(CorruptDataError, match="deleted.json is damaged.*delete it.*keep their"):
        DeletedJobs(tmp_path)
    (tmp_path / "deleted.json").unlink()
    assert DeletedJobs(tmp_path).after(0) == ([], 0)
