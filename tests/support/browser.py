"""Debian's chromium, driven by Playwright: what a person sees of Prefect."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"


@contextmanager
def chromium() -> Iterator[Any]:
    """A page of a headless browser. Skips the test where Debian's package chromium is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no `chromium`; `apt-get install chromium` (as root) lets the browser tests run")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root (in a container, in CI) chromium has no sandbox of its own; it only meets this machine's server.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        page.set_default_timeout(30_000)
        try:
            yield page
        finally:
            browser.close()


def screenshot(page: Any, name: str) -> None:
    """build/screenshots/<name>.png."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
