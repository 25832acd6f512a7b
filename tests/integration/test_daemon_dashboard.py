"""The dashboards of real servers in a real browser: with tokens, over a restart, of an engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from tests.lib.browser import browsing, needs_browser
from tests.lib.daemon import daemon
from tests.lib.program import free_port
from tests.lib.server import LOAD_ALWAYS, idle, serving
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

pytestmark = needs_browser

SIZE = 1 << 20
#: Four of them, each with its header.
HELD = "4.03 MiB"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


async def exchange(url: str, *, absent: int) -> None:
    """Write four objects of a MiB, read them, and ask for some that are not there."""
    connector = connect(url)
    keys = [b"%d" % number for number in range(4)]
    data = memoryview(bytes(SIZE))
    assert await connector.write([WriteItem(key, data) for key in keys]) == [None] * 4
    wanted = [*keys, *(b"none %d" % number for number in range(absent))]
    buffers = [memoryview(bytearray(SIZE)) for _ in wanted]
    requests = [ReadRequest(key, 0, SIZE) for key in wanted]
    assert len(await connector.read(requests, buffers)) == len(wanted)
    await connector.close()


def run(coroutine: Coroutine[None, None, None]) -> None:
    """Run it in a thread of its own: the browser has an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


def shows(page: Page, names: list[list[str]]) -> None:
    """It draws itself anew all the time, so the table is looked at as a whole."""
    expect(page.locator("#names tbody tr")).to_have_text(["".join(row) for row in names])


def unlock(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Show the figures").click()
    expect(page.get_by_role("status")).to_have_text("ok")


def test_each_token_shows_what_its_owner_may_know(browser: Browser, tmp_path: Path) -> None:
    tokens, operators = tmp_path / "tokens", tmp_path / "operators"
    tokens.write_text("search search-token\nchat chat-token\n")
    operators.write_text("operator-token\n")
    for file in (tokens, operators):
        file.chmod(0o600)
    options = (f"--token-file={tokens}", f"--admin-token-file={operators}")
    with daemon(*options) as server:
        for name, absent in (("search", 4), ("chat", 12)):
            url = f"{server.urls[0]}?token_file={tokens}&token_name={name}"
            run(exchange(url, absent=absent))
        page = browser.new_page()
        page.goto(f"{server.http}/")
        expect(page.get_by_role("status")).to_have_text("locked")
        unlock(page, "search-token")
        shows(page, [["search", "4", "4", HELD]])
        page.get_by_role("button", name="Forget the token").click()
        unlock(page, "operator-token")
        shows(page, [["chat", "4", "12", HELD], ["search", "4", "4", HELD]])
        expect(page.get_by_role("img", name=re.compile("^DRAM 33 %$"))).to_have_count(1)
        page.context.close()
        assert server.stop() == 0


def test_a_restart_is_noticed(browser: Browser) -> None:
    """The page stays open: it says that nobody answers, and goes on by itself."""
    options = (f"--http=127.0.0.1:{free_port()}",)
    page = browser.new_page()
    with daemon(*options) as server:
        run(exchange(server.urls[0], absent=0))
        page.goto(f"{server.http}/")
        expect(page.locator("#hits .legend")).to_have_text("DRAM 100 %")
        assert server.stop() == 0
    expect(page.get_by_role("status")).to_have_text("no answer")
    expect(page.get_by_role("alert")).to_contain_text("has not answered since")
    with daemon(*options) as server:
        expect(page.get_by_role("status")).to_have_text("ok")
        expect(page.get_by_text("Nothing has been asked for yet.")).to_be_visible()
        page.context.close()
        assert server.stop() == 0


def test_an_engine_shows_its_own(browser: Browser, tmp_path: Path) -> None:
    config = tiny_config()
    model = write_folder(tmp_path / "model", config, tiny_tensors(config))
    options = ("--block-tokens=4", "--chunk-tokens=16", "--kv-bytes=8MiB", "--dram=64MiB")
    with serving(f"--model={model}", LOAD_ALWAYS, *options) as engine:
        prompt = list(range(10, 210))
        engine.ask(prompt, 4, logprobs=None)
        engine.wait_until(idle)
        engine.ask(prompt, 4, logprobs=None)
        page = browser.new_page()
        page.goto(f"{engine.url}/dashboard")
        expect(page.get_by_role("status")).to_have_text("ok")
        tiers = page.locator("#tiers article .name")
        expect(tiers).to_have_text(["HBMfloat32ok", "DRAMrawok"])
        expect(page.get_by_text("Sequences")).to_be_visible()
        expect(page.get_by_text("This server does not tell namespaces apart.")).to_be_visible()
        page.context.close()
        assert engine.stop() == 0
