import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from damaged_files import damage, damage_values

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.errors import CorruptDataError


def test_rows_of_rounds_are_those_since_the_return_to_an_earlier_commit(tmp_path: Path) -> None:
    rows = RecordedRows(tmp_path)
    assert rows.find("job", 3, 0) is None
    rows.record("job", 3, 20, anew_since=7, first_round=3)
    rows.record("job", 4, 21, anew_since=7, first_round=3)
    rows.record("other", 3, 99, anew_since=0, first_round=3)
    restarted = RecordedRows(tmp_path)
    assert [restarted.find("job", index, 7) for index in (3, 4, 5)] == [20, 21, None]
    assert restarted.find("job", 3, 8) is None
    restarted.record("job", 5, 22, anew_since=7, first_round=4)
    assert [restarted.find("job", index, 7) for index in (3, 4, 5)] == [None, 21, 22]
    restarted.record("job", 4, 30, anew_since=8, first_round=4)
    assert [restarted.find("job", 5, since) for since in (7, 8)] == [None, None]
    restarted.delete("job")
    assert restarted.find("job", 4, 8) is None
    assert restarted.find("other", 3, 0) == 99


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The file in which an older version kept the rows of a job."""
    file = tmp_path / "jobs" / "job" / "round.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"num_rows": {"3": 20, "4": 21}, "anew_since": 7}))
    return file


def test_rows_of_an_older_version_are_taken_over_once(tmp_path: Path, older: Path) -> None:
    rows, text = RecordedRows(tmp_path), older.read_text()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: rows.find("job", 3, 7), range(4)))
    assert found == [20] * 4 and rows.find("job", 4, 7) == 21
    assert not older.exists()
    rows.record("job", 3, 30, anew_since=8, first_round=3)
    older.write_text(text)  # An old copy was put back, or the machine lost power meanwhile.
    assert RecordedRows(tmp_path).find("job", 3, 8) == 30


def test_damaged_rows_of_an_older_version_are_named(tmp_path: Path, older: Path) -> None:
    num_refused, text = 0, older.read_text()
    for how in chain(damage(older), damage_values(older)):
        rows = RecordedRows(tmp_path)
        try:
            found = rows.find("job", 3, 7)
        except CorruptDataError as error:
            num_refused += 1
            assert "round.json" in str(error), how
        else:
            assert found is None or found >= 0, how
            rows.delete("job")
            older.write_text(text)
    for key in ("x", "-1", str(1 << 40)):
        older.write_text(json.dumps({"num_rows": {key: 1}}))
        with pytest.raises(CorruptDataError, match="round.json"):
            rows.find("job", 3, 7)
    assert num_refused > 20
