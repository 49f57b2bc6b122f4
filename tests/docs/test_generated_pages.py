"""The generated pages of docs/ are current, and leave no setting unexplained."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_generator_writes(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run `make docs` and commit the page"


def test_every_setting_has_a_meaning() -> None:
    unexplained = [row for row in PAGES["settings.md"]().splitlines() if row.endswith("|  |")]
    assert not unexplained
