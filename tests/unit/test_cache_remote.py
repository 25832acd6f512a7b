"""A remote below DRAM and disk: lookups that ask, loads from several tiers, uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.match import Pending, Ready
from kvtier.config import WriteMode
from kvtier.constants import REMOTE_ASK_CHUNKS_MIN
from kvtier.errors import ConfigError, RegistryError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    LATENT,
    SPLIT,
    WINDOWED,
    begun,
    ranks,
    refused,
    settle,
    tier_stats,
    written,
)
from tests.lib.remote_lab import (
    RemoteLab,
    ToyRemote,
    chunk_of,
    first_answer,
    remote_counters,
    remote_lab,
    tiers_of,
    tokens_of,
)

FIVE = tokens_of(5)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


# Lookups


def test_a_lookup_asks_and_says_pending_until_it_knows(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.hold("contains")
    sequence = engine.sequence(FIVE)
    answer = engine.cache.match(sequence)
    assert isinstance(answer, Pending)
    again = engine.cache.match(sequence)
    assert isinstance(again, Pending)
    assert again.until == answer.until
    lab.remote.release()
    match = engine.match(sequence)
    assert tiers_of(match) == [Tier.REMOTE] * 5


def test_requests_share_one_question(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.calls.clear()
    lab.remote.hold("contains")
    for _ in range(20):
        assert isinstance(first_answer(engine, FIVE), Pending)
    lab.remote.release()
    for _ in range(20):
        assert engine.match(engine.sequence(FIVE)).tokens == len(FIVE)
    assert lab.remote.calls["contains"] == 1


def test_a_lookup_waits_until_its_deadline_and_no_longer(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.open(clock=clock, pending_deadline_s=2.0, deadline_s=60.0)
    lab.remote.hold("contains")
    sequence = engine.sequence(FIVE)
    answer = engine.cache.match(sequence)
    assert answer == Pending(clock.now() + 2.0)
    clock.advance(1.9)
    assert engine.cache.match(sequence) == answer
    clock.advance(0.1)
    assert isinstance(engine.cache.match(sequence), Ready)
    assert isinstance(first_answer(engine, FIVE), Pending), "another request has its own patience"


def test_what_is_not_there_is_not_asked_for_again_at_once(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.open(clock=clock, absent_s=3.0)
    assert engine.match(engine.sequence(FIVE)).tokens == 0
    asked = lab.remote.calls["contains"]
    for _ in range(10):
        assert isinstance(first_answer(engine, FIVE), Ready)
    assert lab.remote.calls["contains"] == asked
    clock.advance(3.0)
    assert isinstance(first_answer(engine, FIVE), Pending)


def test_a_long_prefix_is_asked_for_in_windows(lab: RemoteLab) -> None:
    tokens = tokens_of(2 * REMOTE_ASK_CHUNKS_MIN + 5)
    engine = lab.filled(tokens, dram_chunks=200)
    lab.remote.batches.clear()
    assert engine.match(engine.sequence(tokens)).tokens == len(tokens)
    asked = [count for operation, count in lab.remote.batches if operation == "contains"]
    assert asked == [REMOTE_ASK_CHUNKS_MIN, REMOTE_ASK_CHUNKS_MIN, 5]


def test_only_what_no_nearer_tier_holds_is_asked_for(lab: RemoteLab) -> None:
    engine = lab.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    lab.remote.batches.clear()
    assert isinstance(first_answer(engine, FIVE), Ready)
    longer = tokens_of(7)
    assert engine.match(engine.sequence(longer)).tokens == len(FIVE)
    assert lab.remote.batches == [("contains", 2)]


def test_a_chunk_counts_only_with_all_of_its_shards(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, layout=SPLIT, placements=ranks(2))
    sequence = engine.sequence(FIVE)
    shards = chunk_of(sequence.chunk_keys[2], lab.remote.objects())
    assert len(shards) == 2
    lab.remote.drop(shards[1])
    assert engine.match(sequence).tokens == 2 * CHUNK


# Loads


@pytest.mark.parametrize(("layout", "size"), [(WINDOWED, 1), (LATENT, 2), (SPLIT, 2)])
def test_what_was_stored_comes_back_byte_by_byte(lab: RemoteLab, layout, size) -> None:  # type: ignore[no-untyped-def]
    engine = lab.filled(FIVE, layout=layout, placements=ranks(size))
    loading = engine.load(engine.match(engine.sequence(FIVE)))
    assert loading.outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
    assert loading.outcome.misses == ()
    assert remote_counters(engine).hit_tokens == len(FIVE)


def test_one_load_has_pieces_of_dram_disk_and_remote(lab: RemoteLab) -> None:
    engine = lab.filled(tokens_of(6), dram_chunks=16, disk_chunks=16)
    engine.store(engine.sequence(tokens_of(4)))
    written(engine)
    lab.close(engine)
    engine = lab.open(dram_chunks=16, disk_chunks=16)
    wait_until(lambda: engine.match(engine.sequence(tokens_of(6))).tokens == 48, "disk opens")
    engine.load(engine.match(engine.sequence(tokens_of(2))))
    settle(engine)
    match = engine.match(engine.sequence(tokens_of(6)))
    assert tiers_of(match) == [Tier.DRAM] * 2 + [Tier.DISK] * 2 + [Tier.REMOTE] * 2
    loading = engine.load(match)
    assert loading.outcome.tokens_by_tier == {
        Tier.DRAM: 2 * CHUNK,
        Tier.DISK: 2 * CHUNK,
        Tier.REMOTE: 2 * CHUNK,
    }


def test_what_has_come_up_is_in_dram_and_goes_to_disk(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, disk_chunks=16)
    wait_until(lambda: not engine.cache.stats().degraded, "the disk does not open")
    engine.load(engine.match(engine.sequence(FIVE)))
    settle(engine)  # Its last bytes were used before the fill was settled.
    assert tiers_of(engine.match(engine.sequence(FIVE))) == [Tier.DRAM] * 5
    written(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 5
    assert remote_counters(engine).written_bytes == 0, "the remote has it already"


def test_two_loads_share_one_fetch(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.hold("read")
    first, second = begun(engine, FIVE), begun(engine, FIVE)
    for loading in (first, second):
        assert loading.load.poll() == []
    lab.remote.release()
    engine.drive(first)
    engine.drive(second)
    for loading in (first, second):
        assert loading.outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
    assert lab.remote.count("read") == 5


def test_a_load_larger_than_dram_goes_in_turns(lab: RemoteLab) -> None:
    tokens = tokens_of(12)
    engine = lab.filled(tokens, dram_chunks=4)
    assert engine.load(engine.match(engine.sequence(tokens))).outcome.end_token == len(tokens)


def test_remotes_are_asked_in_their_order(lab: RemoteLab) -> None:
    lab.remotes.append(ToyRemote())
    engine = lab.filled(FIVE)
    sequence = engine.sequence(FIVE)
    for key in sequence.chunk_keys[2:]:
        (each,) = chunk_of(key, lab.remote.objects())
        lab.remote.drop(each)
    for remote in lab.remotes:
        remote.batches.clear()
    loading = engine.load(engine.match(sequence))
    assert loading.outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
    settle(engine)
    read = [
        sum(count for operation, count in remote.batches if operation == "read")
        for remote in lab.remotes
    ]
    assert read == [2, 3]
    written(engine)
    assert len(lab.remote.objects()) == 5, "the first one has it again"


def test_what_a_disk_has_lost_comes_from_the_remote(lab: RemoteLab) -> None:
    """Within one load: what one place fails to give is tried from the next."""
    engine = lab.open(dram_chunks=6, disk_chunks=32)
    engine.store(engine.sequence(FIVE))
    written(engine)
    for start in range(1000, 1800, 100):
        engine.store(engine.sequence(tokens_of(1, start=start)))
        written(engine)
    match = engine.match(engine.sequence(FIVE))
    assert tiers_of(match) == [Tier.DISK] * 5
    (path,) = (lab.folder / "disk" / "shards").rglob(f"{match.hits[2].key.hex()}*")
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    outcome = engine.load(match).outcome
    assert outcome.tokens_by_tier == {Tier.DISK: 4 * CHUNK, Tier.REMOTE: CHUNK}
    assert outcome.misses == ()
    assert tier_stats(engine.cache, Tier.DISK).counters.corrupt_shards == 1


def test_an_old_epoch_is_out_of_reach(lab: RemoteLab) -> None:
    """Also when it comes up under way."""
    engine = lab.filled(FIVE)
    lab.remote.hold("read")
    loading = begun(engine, FIVE)
    assert loading.load.poll() == []
    engine.cache.invalidate(engine.namespace)
    lab.remote.release()
    assert engine.drive(loading).end_token == 0
    settle(engine)
    sequence = engine.sequence(FIVE)
    assert engine.match(sequence).tokens == 0
    engine.store(sequence)
    written(engine)
    there = lab.remote.objects()  # What came up and is stale may have been deleted there.
    assert all(chunk_of(key, there) for key in sequence.chunk_keys)


# Uploads


def test_what_is_stored_is_written_once(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    engine.store(engine.sequence(FIVE))
    written(engine)
    assert lab.remote.count("write") == 5
    assert remote_counters(engine).written_bytes == 0


def test_write_back_waits_until_much_is_missing_there(lab: RemoteLab) -> None:
    engine = lab.open(dram_chunks=10, mode=WriteMode.BACK)
    engine.store(engine.sequence(tokens_of(5)))
    settle(engine)
    assert lab.remote.objects() == {}
    engine.store(engine.sequence(tokens_of(1, start=1000)))
    wait_until(lambda: engine.cache.stats().writes_queued <= 3, "nothing is written back")
    assert len(lab.remote.objects()) >= 3
    engine.close()
    lab.engines.remove(engine)
    engine.cache.close()
    assert len(lab.remote.objects()) == 6, "at the end everything is"


def test_what_leaves_dram_unwritten_is_counted(lab: RemoteLab) -> None:
    engine = lab.open(dram_chunks=4)
    lab.remote.hold("contains")
    for start in range(0, 3000, 100):
        engine.store(engine.sequence(tokens_of(1, start=start)))
    lab.remote.release()
    written(engine)
    dropped = refused(engine, Tier.REMOTE)[MissReason.NO_ROOM]
    assert dropped + len(lab.remote.objects()) == 30
    assert dropped >= 10


def test_an_admission_decides_what_is_worth_a_write(lab: RemoteLab) -> None:
    engine = lab.open(admission="second-touch")
    engine.store(engine.sequence(FIVE))
    written(engine)
    assert lab.remote.objects() == {}
    match = engine.match(engine.sequence(FIVE))
    engine.cache.note_admission(match, 0, len(FIVE))
    written(engine)
    assert len(lab.remote.objects()) == 5


# A remote of our own


def test_a_sole_writer_keeps_its_bound(lab: RemoteLab) -> None:
    engine = lab.open(capacity_bytes=6 * 16384, connections=1)
    wait_until(lambda: not engine.cache.stats().degraded, "listing")
    for start in range(0, 1200, 100):
        engine.store(engine.sequence(tokens_of(1, start=start)))
        written(engine)
        assert len(lab.remote.objects()) <= 6
    stats = tier_stats(engine.cache, Tier.REMOTE)
    assert (stats.capacity_bytes, stats.used_bytes, stats.chunks) == (6 * 16384, 6 * 16384, 6)
    assert stats.counters.evicted_chunks == 6
    assert engine.match(engine.sequence(tokens_of(1, start=1100))).tokens == CHUNK


def test_a_sole_writer_knows_after_a_restart_what_is_there(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, capacity_bytes=8 * 16384)
    wait_until(lambda: tier_stats(engine.cache, Tier.REMOTE).chunks == 5, "listing")
    lab.remote.calls.clear()
    assert isinstance(first_answer(engine, FIVE), Ready)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    assert lab.remote.calls["contains"] == 0
    for start in range(1000, 1700, 100):
        engine.store(engine.sequence(tokens_of(1, start=start)))
        written(engine)
    assert len(lab.remote.objects()) == 8


def test_what_others_lay_there_is_left_alone(lab: RemoteLab) -> None:
    lab.remote.put(b"a foreign key", b"data")
    engine = lab.open(capacity_bytes=2 * 16384)
    wait_until(lambda: not engine.cache.stats().degraded, "listing")
    for start in range(0, 500, 100):
        engine.store(engine.sequence(tokens_of(1, start=start)))
        written(engine)
    assert b"a foreign key" in lab.remote.objects()


# Settings


def test_a_connector_that_cannot_list_cannot_be_bounded(lab: RemoteLab) -> None:
    class Opaque:
        """Hides ``list``."""

        def __init__(self, inner: object) -> None:
            for name in ("contains", "read", "write", "delete", "close"):
                setattr(self, name, getattr(inner, name))

    lab.wrap = Opaque  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="capacity_bytes"):
        lab.open(capacity_bytes=16384)
    assert lab.remote.closed


def test_an_unknown_policy_leaves_nothing_open(lab: RemoteLab) -> None:
    with pytest.raises(RegistryError, match="policy"):
        lab.open(capacity_bytes=16384, policy="unheard-of")


def test_chunks_that_are_removed_go_from_the_remote_too(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    sequence = engine.sequence(FIVE)
    engine.match(sequence)
    assert engine.cache.remove(sequence.chunk_keys) == [True] * 5
    wait_until(lambda: lab.remote.objects() == {}, "not deleted")
    assert engine.match(engine.sequence(FIVE)).tokens == 0
