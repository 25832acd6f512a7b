"""Codecs, sizes of blocks and other weights between real vLLM and kvtier-serve on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lib.cross_runs import cell, cross_engine
from tests.lib.peers import peer

pytestmark = pytest.mark.timeout(1900)

_TRIED = """
import torch
from kvtier_adapters.vllm.cpu_blocks import vllm_transposes_keys_boundary
for tokens, heads, dim in ((32, 3, 64), (64, 2, 128), (128, 8, 128)):
    assert vllm_transposes_keys_boundary(torch.float32, tokens, heads, dim), tokens
"""


def test_vllm_packs_blocks_as_the_pool_reads_them() -> None:
    done = subprocess.run(
        [str(peer("vllm") / "bin" / "python"), "-c", _TRIED],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_other_weights_are_never_found(tmp_path: Path) -> None:
    rows = cross_engine(tmp_path, "--cases=raw:64:16", "--control", vllm=True)
    assert cell(rows, "kvtier-serve", "vllm")["hit_tokens"] > 0
    controls = [row for row in rows if row["control"]]
    assert [row["reader"] for row in controls] == ["kvtier-serve", "vllm"]
    assert [row["hit_tokens"] for row in controls] == [0, 0]


def test_blocks_that_are_only_bytes_are_kept_apart(tmp_path: Path) -> None:
    opaque = '--vllm-options={"blocks": "opaque"}'
    # One alone: of several the first is computed and stored, and the others find that.
    rows = cross_engine(tmp_path, "--cases=raw:32:16", "--prompts=1", opaque, vllm=True)
    assert cell(rows, "vllm", "vllm")["hit_tokens"] > 0
    for writer, reader in (("kvtier-serve", "vllm"), ("vllm", "kvtier-serve")):
        row = cell(rows, writer, reader)
        assert row["hit_tokens"] == 0, row
        assert row["answers_alike"] == row["prompts"], row


@pytest.mark.parametrize(
    ("codec", "kl_max"), [("int8", 0.01), ("int4", 0.3), ("fp8", 0.3)], ids=str
)
def test_lossy_codecs_through_a_cache_server(tmp_path: Path, codec: str, kl_max: float) -> None:
    rows = cross_engine(tmp_path, f"--cases={codec}:128:32", "--through=daemon", vllm=True)
    for writer in ("kvtier-serve", "vllm"):
        for reader in ("kvtier-serve", "vllm"):
            row = cell(rows, writer, reader)
            assert row["hit_tokens"] > 0, row
            assert row["kl_mean"] < kl_max, row
            # A control of the control: the codec's error is seen, so the KV was used.
            assert row["kl_mean"] > 1e-9, row
