from itertools import chain
from pathlib import Path

import pytest
from damaged_files import damage, damage_values

from collapipe.control_unit.cluster_round import read_num_rows
from collapipe.documents import write_document
from collapipe.errors import CorruptDataError


def test_rows_of_rounds_are_those_since_the_return_to_an_earlier_commit(tmp_path: Path) -> None:
    path = tmp_path / "round.json"
    assert read_num_rows(path, 0) == {}
    write_document(path, {"num_rows": {"3": 20, "4": 21}, "anew_since": 7})
    assert read_num_rows(path, 7) == {3: 20, 4: 21}
    assert read_num_rows(path, 8) == {}


def test_damaged_rows_of_rounds_are_named(tmp_path: Path) -> None:
    path, num_refused = tmp_path / "round.json", 0
    write_document(path, {"num_rows": {"3": 20, "4": 21}, "anew_since": 7})
    for how in chain(damage(path), damage_values(path)):
        try:
            rows = read_num_rows(path, 7)
        except CorruptDataError as error:
            num_refused += 1
            assert "round.json" in str(error), how
        else:
            assert all(number >= 0 for number in rows.values()), how
    assert num_refused > 20
    path.write_text('{"num_rows": {"x": 1}}')
    with pytest.raises(CorruptDataError, match="round.json"):
        read_num_rows(path, 0)
