"""The plug for vLLM with sliding windows: a real cache, and a double that slides as vLLM does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.constants import MIB
from kvtier_adapters.vllm.scheduler_side import Duties
from tests.lib.disk_folder import shard_files
from tests.lib.vllm_double import VllmDouble
from tests.lib.vllm_double_parts import DoubleRequest
from tests.lib.vllm_traffic import answer, doubles, random_traffic, tokens

CHUNK_TOKENS, BLOCKS = 8, 128
#: Groups of one model; 0 attends to all. Windows that end within blocks, and at their ends.
MODELS = [(0, 9), (9, 0, 18), (13,), (6, 0), (0, 5)]
Opener = Callable[..., VllmDouble]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Give what opens doubles of models with these windows."""
    with doubles(CHUNK_TOKENS, BLOCKS, disk_bytes=4 * MIB) as open_double:

        def open_windows(
            windows: tuple[int, ...], disk: Path | None = None, **more: Any
        ) -> VllmDouble:
            return open_double(disk, windows=windows, **more)

        yield open_windows


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_prefix_of_what_was_computed_comes_back(
    ranks: int, windows: tuple[int, ...], opened: Opener, rng: random.Random
) -> None:
    """Also one that ends where the window has long moved on."""
    double = opened(windows, ranks=ranks)
    prompt = tokens(rng, 60)
    assert answer(double, "first", prompt, max_tokens=4).loaded == 0
    second = answer(double, "second", prompt, max_tokens=4)
    assert second.loaded == 56
    assert second.all_token_ids == double.done[0].all_token_ids
    for shared in (16, 24, 40):
        fork = prompt[:shared] + tokens(rng, 9)
        assert answer(double, f"fork at {shared}", fork).loaded == shared
    assert sorted(double.pool.free) == list(range(1, BLOCKS))


@pytest.mark.parametrize("windows", MODELS)
def test_what_was_generated_is_loaded_by_the_next_turn(
    windows: tuple[int, ...], opened: Opener, rng: random.Random
) -> None:
    """Token by token: a window is past a chunk's first blocks when its last one is full."""
    double = opened(windows)
    first = answer(double, "first", tokens(rng, 10), max_tokens=40)
    second = answer(double, "second", first.all_token_ids + tokens(rng, 5))
    assert second.loaded == 48


@pytest.mark.parametrize("windows", MODELS)
def test_a_chunk_begun_by_another_request_is_stored(
    windows: tuple[int, ...], opened: Opener, rng: random.Random
) -> None:
    """Of a prefix that vLLM has itself, only its windows are in the blocks of who goes on."""
    double = opened(windows)
    prompt = tokens(rng, 44)
    first = double.add(DoubleRequest("first", prompt, max_tokens=30))
    while first.num_computed_tokens < 44:
        double.step()
    second = double.add(DoubleRequest("second", prompt + tokens(rng, 20), max_tokens=2))
    double.step()
    assert second.tables[-1][10] == first.tables[-1][10], "it goes on from the first one's blocks"
    double.run()
    assert second.loaded == 0
    assert answer(double, "third", second.prompt).loaded == 60


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_on_disk_is_computed(
    damage: str, windows: tuple[int, ...], opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(windows, tmp_path / "disk")
    prompts = [tokens(rng, 50) for _ in range(4)]
    for number, prompt in enumerate(prompts):
        answer(double, str(number), prompt)
    double.close()
    double.side.close()
    files = shard_files(tmp_path / "disk")
    assert len(files) == 4 * 6 * len(windows)
    for path in rng.sample(files, len(files) * 3 // 10):
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[rng.randrange(4096, 6144)] ^= 1
            path.write_bytes(content)
        elif damage == "truncated":
            path.write_bytes(content[:5000])
        else:
            path.unlink()
    again = opened(windows, tmp_path / "disk")
    loaded = [answer(again, str(n), prompt).loaded for n, prompt in enumerate(prompts)]
    assert 0 not in windows or sum(loaded) < 4 * 48
    assert sorted(again.pool.free) == list(range(1, BLOCKS))


@pytest.mark.parametrize("windows", MODELS)
def test_a_rank_that_refuses_fails_the_load_and_gives_all_blocks_back(
    windows: tuple[int, ...], opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(windows, tmp_path / "disk", ranks=2)
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    double.close()
    double.side.close()
    again = opened(windows, tmp_path / "disk", ranks=2)
    again.workers[1].refuse("an unknown layout")
    # The first lookup finds it, and one of two ranks brings it.
    assert answer(again, "second", prompt, max_tokens=20).loaded == 0
    assert again.side.off == "an unknown layout"
    assert sorted(again.pool.free) == list(range(1, BLOCKS))


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize(("hasty", "each"), [(False, 28), (False, 240), (True, 240)])
def test_random_traffic_answers_as_it_would_without_a_cache(
    hasty: bool,
    each: int,
    windows: tuple[int, ...],
    opened: Opener,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    """Requests that share prefixes, are aborted and preempted; the double looks at every token.

    In pools so small blocks that were given back are soon written to; in those of two and a half
    requests little can be kept, so little is stored.
    """
    count = each * len(windows)
    duties = Duties(4, 4, 0.5, ranks=2, step_tokens=8, windows=windows)
    double = opened(
        windows, tmp_path / "disk", block_count=count, ranks=2, hasty=hasty, duties=duties
    )
    random_traffic(double, rng)
    # How much is loaded is for what is quicker here; that something is stored is not.
    assert each < 240 or double.side.stats().tiers[0].chunks > 0
    assert sorted(double.pool.free) == list(range(1, count))


def test_what_is_kept_is_given_up_before_a_step_lacks_blocks(
    opened: Opener, rng: random.Random
) -> None:
    """Then what the window has left behind is not stored, and is computed by whoever needs it."""
    duties = Duties(4, 4, 0.5, step_tokens=24, windows=(0, 9))
    double = opened((0, 9), block_count=40, duties=duties)
    prompt = tokens(rng, 60)
    first = double.add(DoubleRequest("first", prompt, max_tokens=2))
    double.step()
    free = len(double.pool.free)
    assert free < duties.step_blocks
    double.step()
    assert len(double.pool.free) > free, "what no window needs any more is free at once"
    double.run()
    assert first in double.done
    again = answer(double, "again", prompt, max_tokens=2)
    assert again.all_token_ids == first.all_token_ids
    assert sorted(double.pool.free) == list(range(1, 40))
