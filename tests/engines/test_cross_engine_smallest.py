"""Real vLLM and kvtier-serve on a CPU: each uses KV that the other has computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.cross_runs import cell, cross_engine

pytestmark = pytest.mark.timeout(1000)


def test_each_engine_reads_what_the_other_has_stored(tmp_path: Path) -> None:
    rows = cross_engine(tmp_path, "--cases=raw:32:16", vllm=True)
    ours = cell(rows, "kvtier-serve", "vllm")
    theirs = cell(rows, "vllm", "kvtier-serve")
    assert ours["hit_tokens"] == ours["stored_tokens"] > 0
    # kvtier-serve has in HBM by then what an earlier prompt of the family has loaded.
    assert theirs["found_tokens"] >= theirs["stored_tokens"]
    assert theirs["hit_tokens"] > 0
    for row in rows:
        assert row["answers_alike"] == row["prompts"], row
        assert row["kl_max"] < 1e-6, row
