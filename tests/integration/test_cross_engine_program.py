"""The program that measures cross-engine reuse, with kvtier-serve as both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.cross_runs import cell, cross_engine
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

pytestmark = pytest.mark.timeout(400)


def test_a_second_process_reads_what_the_first_has_stored(tmp_path: Path) -> None:
    config = tiny_config(max_position_embeddings=2048)
    model = write_folder(tmp_path / "model", config, tiny_tensors(config))
    rows = cross_engine(
        tmp_path,
        *("--engines=kvtier-serve", "--cases=raw:32:16", f"--model={model}"),
        vllm=False,
    )
    (row,) = rows
    assert row == cell(rows, "kvtier-serve", "kvtier-serve")
    assert row["hit_tokens"] > 0
    assert row["found_tokens"] >= row["stored_tokens"] > 0
    assert (row["answers_alike"], row["control"]) == (3, False)
    assert row["kl_max"] < 1e-6
