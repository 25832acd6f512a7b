"""Real LMCache over KVTier: its own bench verifies every byte, and both plugs give back KV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.lmcache_runs import bench_l2, kvtier_adapter, on_disk, run_lmcache

#: More than LMCache has buffers.
CALLS_GIVEN_UP = 3000

pytestmark = pytest.mark.timeout(1000)


def test_lmcaches_own_bench_of_l2_adapters_verifies_what_comes_back(tmp_path: Path) -> None:
    sizes = ("--num-keys", "16", "--data-size-kb", "256", "--rounds", "2")
    adapter = kvtier_adapter(**on_disk(tmp_path / "kv"))
    told = bench_l2(adapter, *sizes, "--no-skip-verify", "--lookup-max-hit-rate", "0.5")
    assert "All 16 keys data verified OK" in told
    assert re.findall(r"Total success: +(\d+)", told) == ["32", "16", "32"]
    assert re.findall(r"Rounds timed out: +(\d+)", told) == ["0"] * 3
    assert re.search(r"Actual hit rate: +0\.50", told)


def test_a_remote_connector_gives_chunks_back_whole_and_short(tmp_path: Path) -> None:
    """And after a restart; buffers are given back, those of calls that LMCache gave up as well."""
    options = on_disk(tmp_path / "kv")
    first = run_lmcache("remote", options=options, store=True, given_up=CALLS_GIVEN_UP)
    again = run_lmcache("remote", options=options, store=False, given_up=0)
    assert first == {
        "prefix": 5,
        "same": [True] * 5,
        "missing": [5],
        "removed": [True, False],
        "references": [1],
    }
    assert again["missing"] == [0, 5], "it was removed"
    assert again["same"] == [False, True, True, True, True]
    assert again["references"] == [1]
