"""The Chromium of the system, driven by playwright: nothing is installed by a test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

#: What a page is given to show something, however busy the machine is.
EXPECT_MS = 30_000
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
#: It asks for nothing of the network by itself.
OPTIONS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


_PROGRAM = next(filter(None, map(shutil.which, _PROGRAMS)), None)
#: For every test that browses. CI has a browser, so there nothing is skipped.
needs_browser = pytest.mark.skipif(
    _PROGRAM is None and "CI" not in os.environ,
    reason="needs Chromium (Debian: apt-get install chromium)",
)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start it without a window and end it after.

    An event loop runs in the calling thread meanwhile: whoever needs one of their own begins
    before, or in another thread.
    """
    assert _PROGRAM is not None, "there is no Chromium"
    expect.set_options(timeout=EXPECT_MS)
    # Its sandbox needs another user than root.
    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_PROGRAM, args=options)
        try:
            yield browser
        finally:
            browser.close()
