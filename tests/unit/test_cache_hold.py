"""Chunks that are read where they lie in DRAM: pinned, counted as loads, let go once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.keyed_transfer import Payload
from kvtier.codecs.opaque import opaque_layout
from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier.keys import foreign_key
from kvtier.types import Blocks, Namespace, Plan, Result, Tier

NAMESPACE = Namespace("held", opaque_layout(1), tenant_salt="somebody")
DATA = b"what is held" * 100


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache(CacheConfig(16 * MIB, slab_bytes=4 * MIB))
    yield made
    made.close()


def payload(cache: Cache, nbytes: int | None = None, key: bytes = b"key") -> Payload:
    root = cache.root(NAMESPACE)
    return Payload(NAMESPACE, root, foreign_key(root, "test", key), nbytes)


def begun(cache: Cache) -> Plan:
    """A store whose bytes are in place, and that nobody has answered yet."""
    plan = cache.begin_store(
        payload(cache, len(DATA)), range(1), Blocks(0, ((0,),), block_tokens=1)
    )
    assert plan is not None
    (move,) = plan.moves
    start = move.slot.offset + move.payload_offset
    cache.arena[start : start + len(DATA)] = DATA
    return plan


def answer(cache: Cache, plan: Plan) -> None:
    cache.finish([Result(plan.plan_id, plan.moves[0].worker, ok=True)])


def test_what_is_held_is_pinned_and_counts_as_a_load(cache: Cache) -> None:
    plan = begun(cache)
    answer(cache, plan)
    hold = cache.hold(payload(cache))
    assert hold is not None
    assert hold.codec == f"opaque-{len(DATA)}"
    assert hold.slot == plan.moves[0].slot
    (dram,) = cache.stats().tiers
    assert (dram.tier, dram.pinned_chunks, dram.counters.hit_tokens) == (Tier.DRAM, 1, 1)
    hold.release()
    hold.release()
    (dram,) = cache.stats().tiers
    assert (dram.pinned_chunks, dram.counters.hit_tokens) == (0, 1)
    cache.check_integrity()


def test_b88_what_is_held_stays_though_it_is_removed(cache: Cache) -> None:
    plan = begun(cache)
    answer(cache, plan)
    hold = cache.hold(payload(cache))
    assert hold is not None
    assert cache.remove([payload(cache).key]) == [True]
    assert cache.hold(payload(cache)) is None
    again = begun(cache)
    assert again.moves[0].slot != hold.slot
    answer(cache, again)
    start = hold.slot.offset + plan.moves[0].payload_offset
    assert cache.arena[start : start + len(DATA)] == DATA
    hold.release()
    cache.check_integrity()


def test_what_is_not_there_whole_is_not_held_and_not_counted(cache: Cache) -> None:
    assert cache.hold(payload(cache)) is None
    plan = begun(cache)
    assert cache.hold(payload(cache)) is None, "it is being filled"
    answer(cache, plan)
    assert cache.hold(payload(cache, 7)) is None, "another size was asked for"
    assert cache.hold(payload(cache, key=b"other")) is None
    (dram,) = cache.stats().tiers
    assert (dram.pinned_chunks, dram.counters.hit_tokens) == (0, 0)
    assert not dram.counters.miss_tokens


def test_nothing_of_an_epoch_that_is_over_is_held(cache: Cache) -> None:
    answer(cache, begun(cache))
    before = payload(cache)
    kept = cache.hold(before)
    assert kept is not None
    cache.invalidate(NAMESPACE)
    assert cache.hold(before) is None
    assert cache.hold(payload(cache)) is None
    kept.release()


def test_nothing_is_held_of_a_cache_that_is_closed() -> None:
    cache = Cache(CacheConfig(16 * MIB, slab_bytes=4 * MIB))
    answer(cache, begun(cache))
    hold = cache.hold(payload(cache))
    assert hold is not None
    hold.release()
    cache.close()
    assert cache.hold(payload(cache)) is None
