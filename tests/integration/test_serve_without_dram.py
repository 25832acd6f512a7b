"""Two engines without a DRAM tier at one cache server: nothing of what they share is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.engine_double import wait_until
from tests.lib.daemon import daemon
from tests.lib.server import Served, idle, series, starting
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

NEW_TOKENS = 8
PROMPT = [(7 * position + position // 5) % 250 for position in range(301)]


@pytest.mark.parametrize("way", ["socket", "shared"])
def test_what_one_computed_the_other_loads_and_neither_keeps(tmp_path: Path, way: str) -> None:
    """Same text; through shared memory none of it is copied, through TCP none of it stays."""
    config = tiny_config()
    model = tmp_path / "model"
    write_folder(model, config, tiny_tensors(config))
    where = f"unix:{tmp_path}/socket" if way == "shared" else "127.0.0.1:0"
    with daemon(listen=(where,)) as shared:
        options = [
            f"--model={model}",
            f"--remote={shared.urls[0]}",
            "--block-tokens=4",
            "--chunk-tokens=16",
            "--kv-bytes=8MiB",
            "--dram=0",
            # The model is so small that computing would be quicker than any load.
            "--gpu-time-worth=1000000",
        ]
        with starting(*options) as first, starting(*options) as second:
            for each in (first, second):
                each.wait_for_line("  curl ")
            computed = first.ask(PROMPT, NEW_TOKENS, logprobs=None)
            first.wait_until(idle)
            loaded = second.ask(PROMPT, NEW_TOKENS, logprobs=None)
            for each in (first, second):
                wait_until(lambda: dram_bytes(each) == 0, "something stays in DRAM")  # noqa: B023
            lent = read_bytes(second, "lent")
            copied = read_bytes(second, "read") - lent
            assert first.stop() == 0
            assert second.stop() == 0
        figures = shared.connections()
        assert shared.stop() == 0
    assert sum(computed.cached.values()) == 0
    assert loaded.cached == {"hbm": 0, "dram": 0, "disk": 0, "remote": 288}
    assert loaded.text == computed.text
    assert len(computed.text) > 0
    assert figures["writes"] == (len(PROMPT) + NEW_TOKENS) // 16
    assert (copied == 0) is (way == "shared")
    assert (lent > 0) is (way == "shared")
    assert figures["lost_leases"] == 0


def dram_bytes(server: Served) -> float:
    return server.metrics()[series("tier_used_bytes", tier="dram")]


def read_bytes(server: Served, how: str) -> float:
    return server.metrics()[series(f"tier_{how}_bytes_total", tier="remote")]
