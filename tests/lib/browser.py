"""The Chromium of the system, driven by playwright: nothing is installed by a test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
#: It asks for nothing of the network by itself.
OPTIONS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start it without a window and end it after. Skips where there is none, but for CI.

    An event loop runs in the calling thread meanwhile: whoever needs one of their own begins
    before, or in another thread.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        missing = "no Chromium on this machine (Debian: apt-get install chromium)"
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    # Its sandbox needs another user than root.
    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()
