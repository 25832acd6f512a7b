"""Both sides of the plug for vLLM with a real cache, and a double of vLLM between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.sequence import Sequence
from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier.testing.engine_double import wait_until
from kvtier.types import Blocks, MissReason, Namespace, Plan, Tier
from kvtier_adapters.vllm.scheduler_side import Duties
from tests.lib.disk_folder import shard_files
from tests.lib.vllm_double import VllmDouble, double_geometry
from tests.lib.vllm_double_parts import DoubleRequest
from tests.lib.vllm_traffic import answer, doubles, random_traffic, tokens

CHUNK_TOKENS = 8
Opener = Callable[..., VllmDouble]


def namespace(ranks: int) -> Namespace:
    return Namespace("a double", double_geometry(ranks, 4, 64).layout(CHUNK_TOKENS))


@pytest.fixture
def opened() -> Iterator[Opener]:
    with doubles(CHUNK_TOKENS, block_count=64, disk_bytes=MIB) as open_double:
        yield open_double


class CrowdedCache(Cache):
    """One whose staging area has no room, and that counts how often it is asked for some."""

    asked = 0

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        del chunks, blocks
        self.asked += 1
        sequence.refused = MissReason.CROWDED
        return None


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_second_prompt_begins_where_the_first_one_ended(
    ranks: int, opened: Opener, rng: random.Random
) -> None:
    double = opened(ranks=ranks)
    prompt = tokens(rng, 40)
    assert answer(double, "first", prompt, max_tokens=4).loaded == 0
    # One token of the prompt is left to compute, so the last whole block does not count.
    second = answer(double, "second", prompt, max_tokens=4)
    assert second.loaded == 36
    assert second.all_token_ids == double.done[0].all_token_ids


def test_what_was_generated_is_loaded_by_the_next_turn(opened: Opener, rng: random.Random) -> None:
    double = opened()
    first = answer(double, "first", tokens(rng, 20), max_tokens=20)
    second = answer(double, "second", first.all_token_ids + tokens(rng, 5))
    # Of 40 tokens the last one was sampled and not computed.
    assert second.loaded == 32


def test_all_blocks_come_back(opened: Opener, rng: random.Random) -> None:
    double = opened()
    for number in range(6):
        answer(double, str(number), tokens(rng, 30), max_tokens=3)
    assert sorted(double.pool.free) == list(range(1, 64))


@pytest.mark.parametrize(
    ("first", "second", "loaded"),
    [("", "", 36), ("a", "a", 36), ("a", "b", 0), ("a", "", 0), ("", "a", 0)],
)
def test_tenants_share_nothing(
    first: str, second: str, loaded: int, opened: Opener, rng: random.Random
) -> None:
    double = opened()
    prompt = tokens(rng, 40)
    answer(double, "first", prompt, cache_salt=first)
    assert answer(double, "second", prompt, cache_salt=second).loaded == loaded


@pytest.mark.parametrize("salt", ["", "a"])
def test_a_reset_reaches_every_tenant_and_stays_after_a_restart(
    salt: str, opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(tmp_path / "disk")
    prompt = tokens(rng, 40)
    answer(double, "first", prompt, cache_salt=salt)
    assert double.side.reset()
    assert answer(double, "second", prompt, cache_salt=salt).loaded == 0
    assert answer(double, "third", prompt, cache_salt=salt).loaded == 36


@pytest.mark.parametrize("salt", ["", "a"])
def test_a_request_from_before_a_reset_finds_nothing_of_before(
    salt: str, opened: Opener, rng: random.Random
) -> None:
    """vLLM preempts it, computes it anew with other weights, and asks for what is stored of it."""
    double = opened(hasty=True)
    prompt = tokens(rng, 40)
    first = double.add(DoubleRequest("first", prompt, max_tokens=30, cache_salt=salt))
    while double.side.stats().tiers[0].chunks < 5:
        double.step()
    double.preempt(first)
    assert double.side.reset()
    double.run()
    assert first.loaded == 0
    # Nor is it stored: half of it may have been computed with the weights of before.
    assert answer(double, "second", prompt, cache_salt=salt).loaded == 0
    assert answer(double, "third", prompt, cache_salt=salt).loaded == 36


def test_an_engine_that_keeps_on_a_reset(opened: Opener, rng: random.Random) -> None:
    """Its server sleeps and wakes, which vLLM takes for a reset."""
    double = opened(duties=Duties(4, 4, 0.5, keeps_on_reset=True))
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    assert double.side.reset()
    assert answer(double, "second", prompt).loaded == 36


def test_no_reset_while_a_load_is_under_way(opened: Opener, rng: random.Random) -> None:
    double = opened()
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    second = double.add(DoubleRequest("second", prompt))
    double.step()
    assert second.status == "loading"
    assert not double.side.reset()
    double.run()
    assert double.side.reset()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_on_disk_is_computed(
    damage: str, opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(tmp_path / "disk")
    prompts = [tokens(rng, 50) for _ in range(4)]
    for number, prompt in enumerate(prompts):
        answer(double, str(number), prompt)
    double.close()
    double.side.close()
    files = shard_files(tmp_path / "disk")
    assert len(files) == 24
    for path in rng.sample(files, 8):
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[rng.randrange(4096, 8192)] ^= 1
            path.write_bytes(content)
        elif damage == "truncated":
            path.write_bytes(content[:5000])
        else:
            path.unlink()
    again = opened(tmp_path / "disk")
    loaded = [answer(again, str(n), prompt).loaded for n, prompt in enumerate(prompts)]
    assert 0 < sum(loaded) < 4 * 48
    assert sorted(again.pool.free) == list(range(1, 64))


def test_a_rank_that_refuses_switches_off_and_answers_all_the_same(
    opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(tmp_path / "disk", ranks=2)
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    double.close()
    double.side.close()
    again = opened(tmp_path / "disk", ranks=2)
    again.workers[1].refuse("an unknown layout")
    # The first lookup finds it, and one of two ranks brings it.
    assert answer(again, "second", prompt, max_tokens=6).loaded == 0
    assert again.side.off == "an unknown layout"
    assert answer(again, "third", prompt).loaded == 0
    assert sorted(again.pool.free) == list(range(1, 64))


def test_an_aborted_load_gives_its_blocks_back_once(opened: Opener, rng: random.Random) -> None:
    double = opened()
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    second = double.add(DoubleRequest("second", prompt))
    double.step()
    assert second.status == "loading"
    double.finish(second)
    double.run()
    assert sorted(double.pool.free) == list(range(1, 64))


def test_blocks_of_a_preempted_request_are_kept_while_they_are_stored(
    opened: Opener, rng: random.Random
) -> None:
    double = opened(block_count=40)
    prompt = tokens(rng, 60)
    first = double.add(DoubleRequest("first", prompt, max_tokens=30))
    while first.status != "running" or first.num_computed_tokens < 60:
        double.step()
    double.preempt(first)
    # Others take what is free at once; a block that is being packed is not among it.
    second = double.add(DoubleRequest("second", tokens(rng, 60), max_tokens=2))
    double.run()
    third = answer(double, "third", prompt)
    assert second in double.done
    assert third.loaded == 56


def test_blocks_that_another_request_fills_in_this_very_step_are_not_stored_yet(
    opened: Opener, rng: random.Random
) -> None:
    double = opened(hasty=True)
    prompt = tokens(rng, 24)
    # vLLM counts the second one's prefix as computed before the first one has computed it.
    double.add(DoubleRequest("first", [*prompt, 1]))
    double.add(DoubleRequest("second", [*prompt, 2]))
    double.run()
    assert answer(double, "third", [*prompt, 3]).loaded == 24


def test_a_crowded_staging_area_is_asked_once_a_step(rng: random.Random) -> None:
    """Each time takes long enough that a step of many requests would be late for it."""
    cache = CrowdedCache(CacheConfig(dram_bytes=MIB, slab_bytes=MIB // 8))
    double = VllmDouble(cache, namespace(1))
    requests = [
        double.add(DoubleRequest(str(number), tokens(rng, 24), max_tokens=9)) for number in range(5)
    ]
    asked = []
    for _ in range(4):
        before = cache.asked
        double.step()
        asked.append(cache.asked - before)
    assert all(request.status == "running" for request in requests)
    assert asked == [0, 1, 1, 1]
    double.run()
    double.close()
    cache.close()


def test_embeddings_and_requests_that_read_nothing(opened: Opener, rng: random.Random) -> None:
    double = opened()
    prompt = tokens(rng, 40)
    answer(double, "first", prompt, prompt_embeds=object())
    assert answer(double, "second", prompt).loaded == 0
    assert answer(double, "third", prompt, skip_reading_prefix_cache=True).loaded == 0
    assert answer(double, "fourth", prompt).loaded == 36


@pytest.mark.parametrize(("loads", "stores"), [(True, False), (False, True)])
def test_an_engine_that_does_half(
    loads: bool, stores: bool, opened: Opener, rng: random.Random
) -> None:
    double = opened(duties=Duties(4, 4, 0.5, loads=loads, stores=stores))
    prompt = tokens(rng, 40)
    answer(double, "first", prompt)
    assert answer(double, "second", prompt).loaded == 0
    assert double.side.stats().tiers[0].chunks == (5 if stores else 0)


@pytest.mark.parametrize("hasty", [False, True])
def test_random_traffic_answers_as_it_would_without_a_cache(
    hasty: bool, opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    """Requests that share prefixes, are aborted and preempted; the double looks at every token."""
    double = opened(tmp_path / "disk", block_count=48, ranks=2, hasty=hasty)
    random_traffic(double, rng)
    assert sum(request.loaded for request in double.done) > 0
    assert sorted(double.pool.free) == list(range(1, 48))


def test_what_is_loaded_is_told_by_tier(opened: Opener, rng: random.Random, tmp_path: Path) -> None:
    double = opened(tmp_path / "disk")
    prompt = tokens(rng, 40)
    answer(double, "first", prompt[:20])
    double.close()
    double.side.close()
    again = opened(tmp_path / "disk")
    # Two chunks lie on disk; the request has none of them, and may load their first 12 tokens.
    request = DoubleRequest("second", prompt)
    wait_until(lambda: again.side.lookup(request, 0) != (None, False), "the disk opens")
    assert again.side.lookup(request, 0) == (16, True)
    assert again.side.tiers(request, 12) == {Tier.DISK: 12}
    assert again.side.tiers(DoubleRequest("unknown", prompt), 12) == {}


def test_what_was_prefetched_is_told_as_of_where_it_lay(
    opened: Opener, rng: random.Random, tmp_path: Path
) -> None:
    double = opened(tmp_path / "disk")
    prompt = tokens(rng, 40)
    answer(double, "first", prompt[:20])
    double.close()
    double.side.close()
    again = opened(tmp_path / "disk", duties=Duties(4, 0, 0.5))
    request = DoubleRequest("second", prompt)
    wait_until(lambda: again.side.lookup(request, 0) != (None, False), "the disk opens")
    again.side.arrived(request)

    def in_dram() -> bool:
        return again.side.stats().tiers[0].chunks == 2

    wait_until(in_dram, "what waits is brought up")
    assert again.side.lookup(request, 0) == (16, True)
    assert again.side.tiers(request, 16) == {Tier.DISK: 16}
