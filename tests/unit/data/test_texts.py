"""The texts of a file for `collapipe predict`."""

from pathlib import Path

import pytest

from collapipe.data.texts import read_texts
from collapipe.errors import InvalidInputError


def test_missing_column_is_answered_with_the_option_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("body\nhello\n", encoding="utf-8")
    assert read_texts(path, "body") == ["hello"]
    with pytest.raises(InvalidInputError, match=r"set --column=body \(did you mean 'body'\?\)"):
        read_texts(path, "text")
    path.write_text("body,queue\nhello,a\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="set --column to the name of one"):
        read_texts(path, "text")
