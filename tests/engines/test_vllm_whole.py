"""Real vLLM with the connector against vLLM without: restart, damage, hanging stores, tenants."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.disk_folder import shard_files
from tests.lib.vllm_runs import (
    CHUNK_TOKENS,
    PATIENT,
    Prompt,
    Served,
    VllmRun,
    prompts,
    whole_chunks,
)

pytestmark = pytest.mark.timeout(2000)

FAMILIES, MEMBERS, COUNT = 10, 5, 8
SHARED, OWN = 200, 50
PROMPT_TOKENS = SHARED + OWN
WARM = Prompt(list(range(3, 40)))


@pytest.fixture(scope="module")
def asked() -> list[Prompt]:
    """Fifty prompts, each five of which share their first 200 tokens."""
    return prompts(random.Random(7), families=FAMILIES, members=MEMBERS, shared=SHARED, own=OWN)


@pytest.fixture(scope="module")
def plain(asked: list[Prompt]) -> Served:
    """What vLLM without a connector answers."""
    _, served = VllmRun(None).serve([WARM], 1).serve(asked, COUNT).served()
    return served


@pytest.fixture(scope="module")
def filled(asked: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Served]:
    """A disk tier with all prompts, and what vLLM answered while it was filled."""
    disk = tmp_path_factory.mktemp("filled") / "disk"
    # While the disk is being opened lookups wait, which would change the order of the first steps.
    # To forget, vLLM has to wait for the last stores.
    run = VllmRun(options(disk)).serve([WARM], 1)
    _, served = run.serve(asked, COUNT).forget().served()
    return disk, served


@pytest.fixture
def copied(filled: tuple[Path, Served], tmp_path: Path) -> Path:
    """A copy of the filled disk."""
    disk = tmp_path / "disk"
    shutil.copytree(filled[0], disk)
    return disk


def options(disk: Path, **more: Any) -> dict[str, Any]:
    sizes = {"dram": "256MiB", "disk": str(disk), "chunk_tokens": CHUNK_TOKENS}
    return sizes | PATIENT | more


def check_from_tier(served: Served) -> None:
    """Every family's first prompt, which a new vLLM has nothing of, had its chunks."""
    assert min(served.cached[::MEMBERS]) >= whole_chunks(PROMPT_TOKENS)


def test_filling_the_tiers_changes_nothing(
    asked: list[Prompt], plain: Served, filled: tuple[Path, Served]
) -> None:
    served = filled[1]
    assert served.tokens == plain.tokens
    off = max(
        abs(one - other)
        for ours, theirs in zip(served.logprobs, plain.logprobs, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    # Nothing is loaded, so the same steps are computed in the same order.
    assert off <= 1e-6


def test_prefixes_come_from_disk_after_a_restart(
    asked: list[Prompt], plain: Served, copied: Path
) -> None:
    run = VllmRun(options(copied), processes=True)
    (served,) = run.serve(asked, COUNT).served()
    assert served.tokens == plain.tokens
    check_from_tier(served)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_shards_are_computed_anew(
    damage: str, asked: list[Prompt], plain: Served, copied: Path, rng: random.Random
) -> None:
    files = shard_files(copied)
    for path in rng.sample(files, len(files) * 3 // 10):
        if damage == "missing":
            path.unlink()
        elif damage == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        else:
            content = bytearray(path.read_bytes())
            content[rng.randrange(4096, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
    run = VllmRun(options(copied), processes=True)
    (served,) = run.serve(asked, COUNT).served()
    assert served.tokens == plain.tokens
    assert sum(served.cached) > 0


def test_a_disk_that_hangs_costs_a_deadline(
    asked: list[Prompt], plain: Served, copied: Path
) -> None:
    for path in shard_files(copied):
        path.unlink()
        os.mkfifo(path)  # Whoever opens it waits for ever.
    run = VllmRun(options(copied, load_deadline_s=1.0), processes=True)
    (served,) = run.serve(asked[:10], COUNT).served()
    assert served.tokens == plain.tokens[:10]
    # Computing all fifty, and a deadline for each of the ten.
    assert served.seconds < plain.seconds + 10 * 1.0


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_a_remote_that_hangs_costs_a_deadline(
    silent: int, asked: list[Prompt], plain: Served
) -> None:
    remote = f"kvtier://127.0.0.1:{silent}"
    some = {"dram": "256MiB", "chunk_tokens": CHUNK_TOKENS, "remote": remote}
    run = VllmRun({**some, "pending_deadline_s": 0.5}, processes=True)
    (served,) = run.serve(asked[:10], COUNT).served()
    assert served.tokens == plain.tokens[:10]
    # Computing all fifty, and a deadline for each of the ten.
    assert served.seconds < plain.seconds + 10 * 0.5


def test_zeros_in_place_of_what_was_stored_are_seen(
    asked: list[Prompt], plain: Served, copied: Path
) -> None:
    """The control: were anything but the stored KV loaded, these tests would fail."""
    (served,) = VllmRun(options(copied), zeros=True).serve(asked[:10], COUNT).served()
    check_from_tier(served)
    assert served.tokens != plain.tokens[:10]


def test_tenants_answers_and_resets(asked: list[Prompt], plain: Served) -> None:
    ours = asked[0]
    theirs = Prompt(ours.tokens, salt="theirs")
    longer = Prompt(ours.tokens + plain.tokens[0] + [5] * 60)
    run = VllmRun({"dram": "256MiB", "chunk_tokens": 32, **PATIENT})
    run.serve([ours], COUNT + 40).forget().serve([theirs]).forget().serve([theirs])
    run.forget().serve([longer]).reset().serve([ours, theirs])
    own, other, again, continued, after = run.metrics().served()
    assert own.tokens[0][:COUNT] == plain.tokens[0]
    assert (other.cached, other.tokens) == ([0], plain.tokens[:1])
    assert again.cached[0] > 0
    assert again.tokens == plain.tokens[:1]
    # Answers are stored, too: more comes back than the first prompt had.
    assert continued.cached[0] >= len(ours.tokens)
    # A reset reaches all tenants.
    assert after.cached == [0, 0]
    assert after.tokens == [plain.tokens[0]] * 2


def test_preempted_requests_answer_the_same(asked: list[Prompt], plain: Served) -> None:
    """With blocks for two prompts and a half, four at a time: vLLM preempts and takes up again."""
    run = VllmRun(
        {"dram": "256MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT},
        engine={"num_gpu_blocks_override": 24, "max_model_len": 512},
    )
    run.serve(asked[:8], 100).forget().serve(asked[:8], 100)
    first, _, second, counted = run.metrics().rounds()
    assert sum(count for name, count in counted.items() if "num_preemptions" in name) > 0
    assert sum(count for name, count in counted.items() if "kvtier_hit_tokens" in name) > 0
    assert [tokens[:COUNT] for tokens in first["tokens"]] == plain.tokens[:8]
    assert second["tokens"] == first["tokens"]


def test_two_ranks_share_an_arena(tmp_path: Path, asked: list[Prompt]) -> None:
    """Each rank is a process of its own; the model has dummy weights and two KV heads."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 49_152,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    run = VllmRun(
        {"dram": "64MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT},
        engine={"tensor_parallel_size": 2, "load_format": "dummy"},
        processes=True,
        model=tmp_path,
    )
    cold, warm = run.serve(asked[:4]).forget().serve(asked[:4]).served()
    assert warm.tokens == cold.tokens
    assert warm.cached == [whole_chunks(PROMPT_TOKENS)] * 4
