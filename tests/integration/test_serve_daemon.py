"""Two engines at one cache server: what one has computed the other one loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.server import idle
from tests.lib.two_engines import CHUNK_TOKENS, NEW_TOKENS, PROMPT, STORED_TOKENS, two_engines


@pytest.mark.parametrize("way", ["socket", "shared"])
def test_a_prefix_that_one_engine_computed_is_loaded_by_another(tmp_path: Path, way: str) -> None:
    """Both run at the same time; only the server is between them."""
    query = "?shared_from=0" if way == "shared" else ""
    disk = [f"--disk={tmp_path}/disk", "--disk-bytes=256MiB"]
    running = two_engines(tmp_path, way, dram="64MiB", query=query, options=disk)
    with running as (first, second, server):
        computed = first.ask(PROMPT, NEW_TOKENS, logprobs=None)
        first.wait_until(idle)
        loaded = second.ask(PROMPT, NEW_TOKENS, logprobs=None)
        assert first.stop() == 0
        assert second.stop() == 0
        figures = server.connections()
        assert server.stop() == 0
    assert sum(computed.cached.values()) == 0
    assert loaded.cached == {"hbm": 0, "dram": 0, "disk": 0, "remote": STORED_TOKENS}
    assert loaded.text == computed.text
    assert len(computed.text) > 0
    assert figures["writes"] == (len(PROMPT) + NEW_TOKENS) // CHUNK_TOKENS
    assert figures["reads"] >= STORED_TOKENS // CHUNK_TOKENS
    assert figures["leases"] == (figures["reads"] if way == "shared" else 0)
    assert figures["taken"] == (figures["writes"] if way == "shared" else 0)
