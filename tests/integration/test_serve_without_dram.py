"""Two engines without a DRAM tier at one cache server: nothing of what they share is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.engine_double import wait_until
from tests.lib.server import Served, idle, series
from tests.lib.two_engines import CHUNK_TOKENS, NEW_TOKENS, PROMPT, STORED_TOKENS, two_engines


@pytest.mark.parametrize("way", ["socket", "shared"])
def test_what_one_computed_the_other_loads_and_neither_keeps(tmp_path: Path, way: str) -> None:
    """Same text; through shared memory none of it is copied, through TCP none of it stays."""
    with two_engines(tmp_path, way, dram="0") as (first, second, server):
        computed = first.ask(PROMPT, NEW_TOKENS, logprobs=None)
        first.wait_until(idle)
        loaded = second.ask(PROMPT, NEW_TOKENS, logprobs=None)
        for each in (first, second):
            wait_until(lambda: dram_bytes(each) == 0, "something stays in DRAM")  # noqa: B023
        wait_until(lambda: read_and_lent(second)[0] > 0, "nothing is counted as read")
        read, lent = read_and_lent(second)
        assert first.stop() == 0
        assert second.stop() == 0
        figures = server.connections()
        assert server.stop() == 0
    assert sum(computed.cached.values()) == 0
    assert loaded.cached == {"hbm": 0, "dram": 0, "disk": 0, "remote": STORED_TOKENS}
    assert loaded.text == computed.text
    assert len(computed.text) > 0
    assert figures["writes"] == (len(PROMPT) + NEW_TOKENS) // CHUNK_TOKENS
    assert (read == lent) is (way == "shared")
    assert (lent > 0) is (way == "shared")
    assert figures["lost_leases"] == 0


def dram_bytes(server: Served) -> float:
    return server.metrics()[series("tier_used_bytes", tier="dram")]


def read_and_lent(server: Served) -> tuple[float, float]:
    """Of one moment: each chunk is counted in both at once."""
    metrics = server.metrics()
    names = ("tier_read_bytes_total", "tier_lent_bytes_total")
    read, lent = (metrics[series(name, tier="remote")] for name in names)
    return read, lent
