"""Two engines at one cache server: what one has computed the other one loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.daemon import daemon
from tests.lib.server import idle, starting
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

NEW_TOKENS = 8
PROMPT = [(7 * position + position // 5) % 250 for position in range(301)]


@pytest.mark.parametrize("way", ["socket", "shared"])
def test_a_prefix_that_one_engine_computed_is_loaded_by_another(tmp_path: Path, way: str) -> None:
    """Both run at the same time; only the server is between them."""
    config = tiny_config()
    model = tmp_path / "model"
    write_folder(model, config, tiny_tensors(config))
    where = f"unix:{tmp_path}/socket" if way == "shared" else "127.0.0.1:0"
    from_start = "?shared_from=0" if way == "shared" else ""
    with daemon(f"--disk={tmp_path}/disk", "--disk-bytes=256MiB", listen=(where,)) as shared:
        options = [
            f"--model={model}",
            f"--remote={shared.urls[0]}{from_start}",
            "--block-tokens=4",
            "--chunk-tokens=16",
            "--kv-bytes=8MiB",
            "--dram=64MiB",
            # The model is so small that computing would be quicker than any load.
            "--gpu-time-worth=1000000",
        ]
        with starting(*options) as first, starting(*options) as second:
            for each in (first, second):
                each.wait_for_line("  curl ")
            computed = first.ask(PROMPT, NEW_TOKENS, logprobs=None)
            first.wait_until(idle)
            loaded = second.ask(PROMPT, NEW_TOKENS, logprobs=None)
            assert first.stop() == 0
            assert second.stop() == 0
        figures = shared.connections()
        assert shared.stop() == 0
    assert sum(computed.cached.values()) == 0
    assert loaded.cached == {"hbm": 0, "dram": 0, "disk": 0, "remote": 288}
    assert loaded.text == computed.text
    assert len(computed.text) > 0
    assert figures["writes"] == (len(PROMPT) + NEW_TOKENS) // 16
    assert figures["reads"] >= 288 // 16
    assert figures["leases"] == (figures["reads"] if way == "shared" else 0)
    assert figures["taken"] == (figures["writes"] if way == "shared" else 0)
