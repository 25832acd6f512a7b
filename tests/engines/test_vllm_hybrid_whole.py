"""Real vLLM with full attention and sliding windows: restart, damage, preemption, windows alone."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.lib.disk_folder import shard_files
from tests.lib.vllm_hybrid import ENGINE, write_hybrid
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

MEMBERS, COUNT = 4, 16
PROMPT_TOKENS = 250
WARM = Prompt(list(range(3, 40)))
LAYERS = {
    "hybrid": {},
    "windows alone": {"layer_types": ["sliding_attention"] * 6},
}


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with windows in some layers, or in all."""
    changes: dict[str, Any] = LAYERS[request.param]
    return write_hybrid(tmp_path_factory.mktemp("model"), **changes)


@pytest.fixture(scope="module")
def asked() -> list[Prompt]:
    """Prompts of which each four share their first 200 tokens."""
    return prompts(random.Random(11), families=3, members=MEMBERS, shared=200, own=50)


@pytest.fixture(scope="module")
def plain(model: Path, asked: list[Prompt]) -> Served:
    """What vLLM without a connector answers."""
    run = VllmRun(None, engine=ENGINE, model=model)
    return run.serve([WARM], 1).serve(asked, COUNT).served()[1]


@pytest.fixture(scope="module")
def filled(model: Path, asked: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk tier with all prompts."""
    disk = tmp_path_factory.mktemp("filled") / "disk"
    run = VllmRun(options(disk), engine=ENGINE, model=model)
    run.serve([WARM], 1).serve(asked, COUNT).forget().served()
    # A shard's name ends in its KV group, stage and head group, four digits each.
    groups = {path.name.partition("-")[0][-12:-8] for path in shard_files(disk)}
    assert len(groups) == kv_groups(model)
    return disk


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """A copy of the filled disk."""
    disk = tmp_path / "disk"
    shutil.copytree(filled, disk)
    return disk


def options(disk: Path) -> dict[str, Any]:
    sizes = {"dram": "256MiB", "disk": str(disk), "chunk_tokens": CHUNK_TOKENS}
    return sizes | PATIENT


def kv_groups(model: Path) -> int:
    """How many groups vLLM makes of a model: four windows and two full layers are two each."""
    return 3 if "full_attention" in (model / "config.json").read_text() else 1


def furthest(served: Served, other: Served) -> float:
    """The largest difference of a token's log-probability."""
    pairs = zip(served.logprobs, other.logprobs, strict=True)
    return max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_after_a_restart_prefixes_come_from_disk(
    model: Path, asked: list[Prompt], plain: Served, copied: Path
) -> None:
    run = VllmRun(options(copied), engine=ENGINE, model=model, processes=True)
    (served,) = run.serve(asked, COUNT).served()
    assert served.tokens == plain.tokens
    assert furthest(served, plain) <= 1e-5
    # On a busy machine a load may be given up, and then none of its windows counts.
    assert max(served.cached[::MEMBERS]) >= whole_chunks(PROMPT_TOKENS)


def test_damaged_shards_are_computed_anew(
    model: Path, asked: list[Prompt], plain: Served, copied: Path, rng: random.Random
) -> None:
    files = shard_files(copied)
    for path in rng.sample(files, len(files) * 3 // 10):
        content = bytearray(path.read_bytes())
        content[rng.randrange(4096, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    run = VllmRun(options(copied), engine=ENGINE, model=model, processes=True)
    (served,) = run.serve(asked, COUNT).served()
    assert served.tokens == plain.tokens
    assert furthest(served, plain) <= 1e-5


def test_zeros_in_place_of_what_was_stored_are_seen(
    model: Path, asked: list[Prompt], plain: Served, copied: Path
) -> None:
    """The control: were anything but the stored KV loaded, these tests would fail."""
    run = VllmRun(options(copied), engine=ENGINE, model=model, zeros=True)
    (served,) = run.serve(asked[:4], COUNT).served()
    assert max(served.cached) >= whole_chunks(PROMPT_TOKENS)
    assert served.tokens != plain.tokens[:4]


def test_answers_come_back_and_preempted_requests_answer_the_same(
    model: Path, asked: list[Prompt], plain: Served
) -> None:
    """With few blocks: vLLM preempts, and what is kept of windows has to give way."""
    engine = {**ENGINE, "max_model_len": 512}
    few = {**engine, "num_gpu_blocks_override": 24 * kv_groups(model)}
    sizes = {"dram": "256MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT}
    run = VllmRun(sizes, engine=few, model=model)
    first, second = run.serve(asked, 60).forget().serve(asked, 60).served()
    assert [tokens[:COUNT] for tokens in first.tokens] == plain.tokens
    assert second.tokens == first.tokens
    # With room for all, answers are loaded, too: what was decoded token by token.
    roomy = VllmRun(sizes, engine=engine, model=model).serve(asked[:1], 100).forget()
    longer = Prompt(asked[0].tokens + first.tokens[0] + [5] * 10)
    _, continued = roomy.serve([longer], COUNT).served()
    assert continued.cached[0] >= whole_chunks(PROMPT_TOKENS + 60 - 1)
