"""Pins and times to leave: what stays when the tiers are full, and what goes before that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.cache.tenancy.pins import KeptKeys, PinOutcome
from kvtier.cache.tenancy.wishes import Wishes
from kvtier.constants import (
    EXPIRING_CHUNKS_MAX,
    PIN_S_MAX,
    PINNED_CHUNKS_MAX,
    PINNED_SHARE_MAX,
    RECLAIMED_CHUNKS_MAX,
)
from kvtier.errors import ConfigError
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, Entry, Features, MissReason, Namespace, ShardId, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    NAMESPACE,
    CacheSetup,
    cache_setup,
    tier_stats,
    written,
)

FOUR = range(4 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def found(engine: EngineDouble, tokens: range = FOUR) -> int:
    return engine.match(engine.sequence(tokens)).tokens


def wishing(
    engine: EngineDouble, features: Features, tokens: range = FOUR, namespace: Namespace = NAMESPACE
) -> Sequence:
    sequence = engine.cache.sequence(namespace, features=features)
    sequence.append(list(tokens))
    return sequence


def flood(engine: EngineDouble, chunks: int) -> None:
    """Store other sequences, one chunk each, so many that all that may leave has left."""
    for number in range(chunks):
        start = 10_000 + number * CHUNK
        engine.store(engine.sequence(range(start, start + CHUNK)))
    written(engine)


def pinned(engine: EngineDouble, tokens: range = FOUR) -> int:
    return engine.cache.pins.pinned_tokens(engine.sequence(tokens))


@pytest.mark.parametrize("disk_chunks", [None, 12])
@pytest.mark.parametrize("slab_bytes", [4096, 8 * CHUNK_BYTES])
def test_what_is_pinned_stays(setup: CacheSetup, disk_chunks: int | None, slab_bytes: int) -> None:
    clock = FakeClock()
    engine = setup.open(dram_chunks=8, disk_chunks=disk_chunks, clock=clock, slab_bytes=slab_bytes)
    engine.match(engine.sequence([]))
    engine.store(engine.sequence(FOUR))
    written(engine)
    match = engine.match(engine.sequence(FOUR))
    assert engine.cache.pins.pin(match, 60.0) == PinOutcome(32, None)
    flood(engine, 30)
    assert found(engine) == 32
    assert pinned(engine) == 32
    clock.advance(60.0)
    assert pinned(engine) == 0
    flood(engine, 30)
    assert found(engine) == 0, "its time was over"


def test_without_a_pin_it_leaves(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=8, disk_chunks=12)
    engine.store(engine.sequence(FOUR))
    written(engine)
    flood(engine, 30)
    assert found(engine) == 0


def test_a_pin_is_taken_back(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=8, disk_chunks=None)
    engine.store(engine.sequence(FOUR))
    match = engine.match(engine.sequence(FOUR))
    engine.cache.pins.pin(match, 60.0)
    assert engine.cache.pins.unpin(match) == 32
    assert engine.cache.pins.unpin(match) == 0
    flood(engine, 30)
    assert found(engine) == 0


def test_what_was_pinned_is_unpinned_by_its_tokens_even_where_it_is_gone(
    setup: CacheSetup,
) -> None:
    engine = setup.open(disk_chunks=None)
    sequence = engine.sequence(range(2 * CHUNK))
    engine.store(sequence)
    engine.cache.pins.pin(engine.match(sequence), 60.0)
    engine.cache.remove(sequence.chunk_keys[1:])
    assert engine.cache.pins.unpin_sequence(sequence) == 2 * CHUNK
    assert engine.cache.pins.pinned_tokens(sequence) == 0
    assert engine.cache.pins.unpin_sequence(sequence) == 0


def test_a_second_pin_prolongs_and_never_shortens(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(disk_chunks=None, clock=clock)
    engine.store(engine.sequence(FOUR))
    match = engine.match(engine.sequence(FOUR))
    for seconds in (10.0, 60.0, 5.0):
        engine.cache.pins.pin(match, seconds)
    clock.advance(59.0)
    assert pinned(engine) == 32


def test_no_more_than_half_of_a_tier_is_pinned_and_the_rest_is_told(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=8, disk_chunks=None)
    engine.store(engine.sequence(range(6 * CHUNK)))
    match = engine.match(engine.sequence(range(6 * CHUNK)))
    assert engine.cache.pins.pin(match, 60.0) == PinOutcome(4 * CHUNK, MissReason.NO_ROOM)
    flood(engine, 30)
    assert found(engine, range(6 * CHUNK)) == 4 * CHUNK


def test_what_is_on_disk_is_pinned_there_where_dram_has_no_share(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=4, disk_chunks=24)
    engine.match(engine.sequence([]))
    long = range(10 * CHUNK)
    for end in range(2, 12, 2):
        engine.store(engine.sequence(long[: end * CHUNK]))
        written(engine)
    match = engine.match(engine.sequence(long))
    assert engine.cache.pins.pin(match, 60.0) == PinOutcome(10 * CHUNK, None)
    flood(engine, 60)
    assert found(engine, long) == 10 * CHUNK


def test_what_no_tier_holds_is_not_pinned(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(range(2 * CHUNK)))
    match = engine.match(engine.sequence(FOUR))
    assert engine.cache.pins.pin(match, 60.0) == PinOutcome(2 * CHUNK, MissReason.ABSENT)


def test_a_pin_ends_with_the_epoch(setup: CacheSetup) -> None:
    engine = setup.open(disk_chunks=None, clock=FakeClock())
    engine.store(engine.sequence(FOUR))
    match = engine.match(engine.sequence(FOUR))
    engine.cache.pins.pin(match, 60.0)
    engine.cache.invalidate(NAMESPACE)
    assert engine.cache.pins.pin(match, 60.0) == PinOutcome(0, MissReason.UNAVAILABLE)
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).used_bytes == 0, "it stays for ever")


@pytest.mark.parametrize("seconds", [0.0, -1.0, PIN_S_MAX * 1.1, float("nan"), float("inf")])
def test_a_pin_has_a_time(setup: CacheSetup, seconds: float) -> None:
    engine = setup.open(disk_chunks=None)
    with pytest.raises(ConfigError, match="seconds"):
        engine.cache.pins.pin(engine.match(engine.sequence(FOUR)), seconds)


def test_a_request_pins_what_it_stores_and_what_it_finds(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=12, disk_chunks=None)
    engine.store(engine.sequence(range(2 * CHUNK)))
    sequence = wishing(engine, Features(pin_s=60.0))
    engine.cache.note_admission(engine.match(sequence), 0, 4 * CHUNK)
    assert pinned(engine) == 2 * CHUNK
    assert engine.store(sequence)
    assert pinned(engine) == 4 * CHUNK
    flood(engine, 40)
    assert found(engine) == 32


def test_pinned_chunks_do_not_give_way_to_a_tenants_own(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours", disk_chunks=None, quota_chunks=6)
    engine.store(engine.sequence(FOUR))
    engine.cache.pins.pin(engine.match(engine.sequence(FOUR)), 60.0)
    flood(engine, 30)
    assert found(engine) == 32
    assert engine.cache.tenants.nbytes("ours") == 6 * CHUNK_BYTES


def test_pins_are_bounded_in_bytes() -> None:
    kept = KeptKeys(1000, FakeClock())
    first, second = ChunkKey(b"1" * 32), ChunkKey(b"2" * 32)
    share = int(1000 * PINNED_SHARE_MAX)
    assert not kept.keep(first, share + 1, b"", 9.0)
    assert kept.keep(first, share, b"", 9.0)
    assert kept.nbytes == share
    assert not kept.keep(second, 1, b"", 9.0)
    assert kept.drop(first)
    assert kept.keep(second, 1, b"", 9.0)


def test_pins_are_bounded_in_number() -> None:
    kept = KeptKeys(1 << 40, FakeClock())
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(PINNED_CHUNKS_MAX + 1)]
    assert [kept.keep(key, 1, b"", 9.0) for key in keys] == [True] * PINNED_CHUNKS_MAX + [False]
    assert kept.keep(keys[0], 1, b"", 99.0), "prolonging one is no new one"
    assert kept.drop(keys[1])
    assert kept.keep(keys[-1], 1, b"", 9.0)


def test_what_is_pinned_is_passed_over_once_and_not_by_every_decision() -> None:
    class CountingClock(FakeClock):
        looks = 0

        def now(self) -> float:
            self.looks += 1
            return super().now()

    def entry(number: int) -> Entry:
        return Entry(ChunkKey(number.to_bytes(32, "big")), None, 1, 0)

    clock = CountingClock()
    kept = KeptKeys(1000, clock)
    policy = kept.guard(LRU)(100, lambda _: False)
    for number in range(100):
        policy.admit(entry(number), float(number))
    for number in range(50):
        kept.keep(entry(number).key, 1, b"", 9e9)
    looks = []
    for number in range(100, 110):
        clock.looks = 0
        assert policy.admit(entry(number), float(number)) == [entry(number - 50).key]
        looks.append(clock.looks)
    assert looks == [50] + [0] * 9


def test_a_slab_with_a_pinned_chunk_is_not_given_over() -> None:
    """Room of another size is made by emptying a slab, whatever the policy says."""
    kept, clock = ChunkKey(b"k" * 32), FakeClock()
    arena = Arena(2 * 16384, slab_bytes=16384)
    dram = DramTier(arena, LRU, clock, lambda _: None, kept.__eq__)

    def store(name: bytes, nbytes: int) -> None:
        clock.advance(1.0)
        entry = Entry(ChunkKey(name * 32), None, nbytes, 0)
        record = dram.reserve(entry, b"n", "raw", {ShardId(0, 0, 0): nbytes})
        assert record is not None
        dram.commit(record)

    for name in (b"k", b"a", b"l", b"b"):
        store(name, 8192)
    for name in (b"a", b"b"):
        record = dram.index.ready(ChunkKey(name * 32))
        assert record is not None
        dram.leave(record)
    store(b"m", 16384)
    assert {record.entry.key[:1] for record in dram.index} == {b"k", b"m"}
    arena.close()


# Times to leave


def test_what_has_had_its_time_leaves_every_tier(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.match(engine.sequence([]))
    engine.store(wishing(engine, Features(ttl_s=30.0)))
    engine.store(engine.sequence(range(1000, 1000 + CHUNK)))
    written(engine)
    clock.advance(29.0)
    assert found(engine) == 32
    clock.advance(1.0)
    wait_until(lambda: not found(engine), "it does not leave")
    wait_until(lambda: len(setup.shard_files()) == 1, "its files stay")
    assert tier_stats(engine.cache, Tier.DRAM).used_bytes == CHUNK_BYTES


def test_an_access_without_a_time_keeps_a_chunk_and_one_with_a_time_moves_it(
    setup: CacheSetup,
) -> None:
    clock = FakeClock()
    engine = setup.open(disk_chunks=None, clock=clock)
    kept, moved = FOUR, range(1000, 1000 + 4 * CHUNK)
    timed = Features(ttl_s=30.0)
    for tokens in (kept, moved):
        engine.store(wishing(engine, timed, tokens))
    clock.advance(20.0)
    for tokens, features in ((kept[:16], Features()), (moved[:16], timed)):
        sequence = wishing(engine, features, tokens)
        engine.cache.note_admission(engine.match(sequence), 0, 16)
    clock.advance(20.0)
    wait_until(lambda: (found(engine, kept), found(engine, moved)) == (16, 16), "what was not used")
    clock.advance(15.0)
    wait_until(lambda: (found(engine, kept), found(engine, moved)) == (16, 0), "the second time")


def test_a_pinned_chunk_outlives_its_time(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(disk_chunks=None, clock=clock)
    engine.store(wishing(engine, Features(ttl_s=5.0, pin_s=60.0)))
    engine.store(wishing(engine, Features(ttl_s=5.0), range(1000, 1000 + CHUNK)))
    clock.advance(10.0)
    wait_until(lambda: not found(engine, range(1000, 1000 + CHUNK)), "the other one leaves")
    assert found(engine) == 32
    clock.advance(60.0)
    wait_until(lambda: not found(engine), "it leaves when its pin is over")


def test_what_others_stored_without_a_time_gets_none(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(disk_chunks=None, clock=clock)
    engine.store(engine.sequence(FOUR))
    sequence = wishing(engine, Features(ttl_s=5.0), range(6 * CHUNK))
    engine.cache.note_admission(engine.match(sequence), 0, 6 * CHUNK)
    engine.store(sequence)
    clock.advance(5.0)
    wait_until(lambda: found(engine, range(6 * CHUNK)) == 32, "it leaves what it did not store")


def test_times_to_leave_are_bounded_in_number(setup: CacheSetup) -> None:
    """What comes after so many has no time of its own, and is evicted as anything is."""
    engine = setup.open(disk_chunks=None)
    clock, gone = FakeClock(), list[ChunkKey]()

    def remove(key: ChunkKey) -> bool:
        gone.append(key)
        return True

    wishes = Wishes(clock, engine.cache.pins, remove)
    sequence = wishing(engine, Features(ttl_s=1.0))
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(EXPIRING_CHUNKS_MAX + 1)]
    for key in keys:
        wishes.stored(sequence, Entry(key, None, 1, 0))
    clock.advance(1.0)
    steps = 0
    while len(gone) < EXPIRING_CHUNKS_MAX:
        before = len(gone)
        wishes.step()
        assert 0 < len(gone) - before <= RECLAIMED_CHUNKS_MAX
        steps += 1
    wishes.step()
    assert set(gone) == set(keys[:-1])


def test_features_say_nothing_by_default() -> None:
    assert replace(Features(), ttl_s=0.0, pin_s=0.0) == Features()
