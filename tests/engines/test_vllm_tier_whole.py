"""Real vLLM with KVTier below its CPU tier: restarts, corrupt files, a lie, a reset."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lib.vllm_runs import BLOCK_TOKENS, Prompt, prompts
from tests.lib.vllm_tier_runs import served, tier_table

pytestmark = pytest.mark.timeout(3000)


def whole(prompt: Prompt) -> int:
    return (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_after_a_restart_it_comes_from_disk_and_corrupt_files_change_no_token(
    tmp_path: Path, rng: random.Random
) -> None:
    asked = prompts(rng, families=1, members=2, shared=100, own=30)
    table = tier_table(tmp_path / "kv")
    cold, _ = served(table, asked, None, asked[:1])
    assert len(list((tmp_path / "kv").rglob("*.kvs"))) >= 5, "one for each block of the prompts"
    (again,) = served(table, asked)
    assert again.tokens == cold.tokens
    assert again.cached[0] == whole(asked[0])
    zeroed, _ = served(table, asked, None, asked[:1], zeros=True)
    assert zeroed.tokens != cold.tokens, "what is loaded has a say"
    files = sorted((tmp_path / "kv").rglob("*.kvs"))
    assert files
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if number % 2 else data)
    spoilt, mended = served(table, asked, None, asked)
    assert spoilt.tokens == mended.tokens == cold.tokens
    assert 0 in spoilt.cached
    assert mended.cached[0] == whole(asked[0]), "what was computed is stored anew"


def test_b11_a_reset_of_vllms_cache_forgets_what_lies_below(
    tmp_path: Path, rng: random.Random
) -> None:
    asked = prompts(rng, families=1, members=1, shared=100, own=30)
    table = tier_table(tmp_path / "kv", keep_on_reset=False)
    cold, after = served(table, asked, None, asked)
    assert after.tokens == cold.tokens
    assert after.cached == [0]


@pytest.mark.parametrize("whose", ["kvtier", "fs"])
def test_b66_b78_files_with_other_bytes_change_no_token_of_ours(
    tmp_path: Path, rng: random.Random, whose: str
) -> None:
    """vLLM's own ``fs`` tier, which has no checksums, hands them to the model."""
    asked = prompts(rng, families=1, members=1, shared=100, own=30)
    folder = tmp_path / "kv"
    table = tier_table(folder) if whose == "kvtier" else {"type": "fs", "root_dir": str(folder)}
    cold, warm = served(table, asked, None, asked)
    assert warm.tokens == cold.tokens
    files = [path for path in folder.rglob("*") if path.suffix in {".kvs", ".bin"}]
    assert len(files) >= whole(asked[0]) // BLOCK_TOKENS
    for path in files:
        data = path.read_bytes()
        half = len(data) // 2
        path.write_bytes(data[:half] + rng.randbytes(len(data) - half))
    (spoilt,) = served(table, asked)
    if whose == "kvtier":
        assert (spoilt.tokens, spoilt.cached) == (cold.tokens, [0])
    else:
        assert spoilt.cached == [whole(asked[0])], "the peer is what we think it is"
        assert spoilt.tokens != cold.tokens
