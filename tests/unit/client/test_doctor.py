from pathlib import Path

import pytest

from collapipe_client.cli_options import read_bytes
from collapipe_client.doctor import check_memory, check_packages, check_python, check_workspace


@pytest.mark.parametrize(
    ("available", "result"), [(5 * 10**8, "fail"), (4 * 10**9, "warn"), (8 * 10**9, "ok")]
)
def test_memory_is_judged_by_what_the_demo_needs(available: int, result: str) -> None:
    check = check_memory(available)
    assert check.result == result
    assert bool(check.remedy) == (result != "ok")


def test_old_python_fails() -> None:
    assert check_python((3, 10, 4)).result == "fail"
    assert check_python((3, 11, 0)).result == "ok"


def test_missing_package_names_the_extra() -> None:
    check = check_packages("device", lambda name: name != "torch")
    assert (check.result, check.found) == ("warn", "missing torch")
    assert "collapipe[device]" in check.remedy


def test_workspace_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_workspace(tmp_path / "file" / "w").result == "fail"
    assert check_workspace(tmp_path / "new" / "w").result == "ok"


@pytest.mark.parametrize(
    ("text", "size"), [("200MB", 200_000_000), ("1.5 GiB", 3 * 2**29), ("0", 0), ("7", 7)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert read_bytes(text) == size
