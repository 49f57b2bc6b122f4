"""One browser for all tests of a worker: a second one in the same process is an error of Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason="needs the Python package playwright")
    from benchmarks.browser import CHROMIUM, open_browser

    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    with open_browser() as browser:
        yield browser
