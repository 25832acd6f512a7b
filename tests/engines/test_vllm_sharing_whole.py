"""Several servers of real vLLM share what one of them has stored: by a daemon, in other degrees."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.lib.daemon import daemon
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder
from tests.lib.vllm_runs import CHUNK_TOKENS, PATIENT, Prompt, Served, VllmRun, whole_chunks

pytestmark = pytest.mark.timeout(1800)

OPTIONS = {"dram": "64MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT}
PROMPT_TOKENS = 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can share: SmolLM2 has three KV heads."""
    config = tiny_config(
        model_type="llama",
        torch_dtype="float32",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
    )
    return write_folder(tmp_path_factory.mktemp("model"), config, tiny_tensors(config))


@pytest.fixture
def asked(rng: random.Random) -> list[Prompt]:
    return [Prompt([rng.randrange(256) for _ in range(PROMPT_TOKENS)]) for _ in range(4)]


def run(model: Path, asked: list[Prompt], ranks: int = 1, **options: Any) -> tuple[Served, int]:
    """What a server answers, and how many tokens it had from stores of others."""
    engine = {"tensor_parallel_size": ranks}
    vllm = VllmRun(OPTIONS | options, engine=engine, processes=True, model=model)
    served, counted = vllm.serve(asked).metrics().rounds()
    remote = '"tier": "remote"'
    tokens = sum(
        count for name, count in counted.items() if "hit_tokens" in name and remote in name
    )
    return Served(**served), int(tokens)


def test_servers_on_one_daemon_share(model: Path, asked: list[Prompt], tmp_path: Path) -> None:
    with daemon(listen=[f"unix:{tmp_path / 'socket'}"]) as server:
        (url,) = server.urls
        cold, nothing = run(model, asked, remote=url)
        assert (cold.cached, nothing) == ([0] * 4, 0)
        warm, tokens = run(model, asked, remote=url)
        assert warm.tokens == cold.tokens
        assert warm.cached == [whole_chunks(PROMPT_TOKENS)] * 4
        # Figures are told once a second, so the last ones may be missing.
        assert 0 < tokens <= sum(warm.cached)
        # Without a copy of its own.
        bare, tokens = run(model, asked, remote=url, dram=0)
        assert (bare.tokens, bare.cached) == (warm.tokens, warm.cached)
        assert tokens > 0
        # In other parts, it is another's KV.
        other, tokens = run(model, asked, remote=url, head_groups=2)
        assert (other.tokens, other.cached, tokens) == (cold.tokens, [0] * 4, 0)


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_degrees_share_if_they_name_the_same_parts(
    writer: int, reader: int, model: Path, asked: list[Prompt], tmp_path: Path
) -> None:
    shared = {"disk": str(tmp_path), "head_groups": 2}
    cold, _ = run(model, asked, writer, **shared)
    warm, _ = run(model, asked, reader, **shared)
    assert cold.cached == [0] * 4
    assert warm.cached == [whole_chunks(PROMPT_TOKENS)] * 4
    assert warm.tokens == cold.tokens
