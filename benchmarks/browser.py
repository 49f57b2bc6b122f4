"""Opens Debian's Chromium, for the pictures of the page and for its tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
"""Path of the browser; `None` if it is not installed. Playwright's own browsers are not used, so nothing is downloaded."""

PHONE = {"width": 360, "height": 740}
SCREEN = {"width": 1280, "height": 800}


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Starts Chromium without a window. It makes no request but those of the pages."""
    options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield browser
        finally:
            browser.close()


def open_page(context: BrowserContext, link: str, tab: str = "now") -> Page:
    """Opens the page of a scheduler in a tab, and waits until it follows the changes.

    Args:
        link: With the key, or without it if the context has the cookie already.
    """
    page = context.new_page()
    page.goto(link)
    page.locator("#connection.on").wait_for()
    page.goto(f"{link.split('#')[0]}#tab={tab}")
    page.locator(f"#tab-{tab}[aria-selected=true]").wait_for()
    return page
