"""Without a DRAM tier: what a remote lends is loaded from where it lies, and nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import LEND_PAUSE_S, STORE_STAGING_SHARE
from kvtier.errors import ConnectorUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.types import KVLayout, MissReason, Plan, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    LAYOUT,
    SPLIT,
    WINDOWED,
    ranks,
    settle,
    tier_stats,
    written,
)
from tests.lib.lending_remote import LendingRemote, ToyLoan
from tests.lib.remote_lab import (
    RemoteLab,
    chunk_of,
    remote_counters,
    remote_lab,
    tiers_of,
    tokens_of,
)

FIVE = tokens_of(5)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as made:
        made.remotes = [LendingRemote()]
        yield made
        quietly(made)


def lending(lab: RemoteLab) -> LendingRemote:
    assert isinstance(lab.remote, LendingRemote)
    return lab.remote


def quietly(lab: RemoteLab) -> None:
    """In the end nothing is lent any more, nothing lies in DRAM, and the books agree."""
    remote = lending(lab)
    for engine in lab.engines:
        settle(engine)
        wait_until(lambda: empty(engine), "something stays")  # noqa: B023 - called at once
    assert remote.lent == 0


def empty(engine: EngineDouble) -> bool:
    dram = tier_stats(engine.cache, Tier.DRAM)
    return not dram.used_bytes + dram.chunks + engine.cache.window.lent_bytes


def poised(lab: RemoteLab, engine: EngineDouble) -> tuple[Loading, list[Plan]]:
    """A load of everything, with its plans: all is verified and nothing moved yet."""
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    plans: list[Plan] = []

    def ordered() -> bool:
        plans.extend(loading.load.poll())
        return sum(len(plan.moves) for plan in plans) > 0 and engine.cache.window.lent_bytes > 0

    wait_until(ordered, "nothing is ordered")
    return loading, plans


def load_all(engine: EngineDouble) -> None:
    """Load it and wait until what brought it has ended, a little after the load itself."""
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    settle(engine)


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED, SPLIT], ids=["full", "windowed", "split"])
def test_what_is_lent_comes_from_where_it_lies(lab: RemoteLab, layout: KVLayout) -> None:
    engine = lab.filled(FIVE, layout=layout, dram_chunks=0)
    match = engine.match(engine.sequence(FIVE))
    assert tiers_of(match) == [Tier.REMOTE] * 5
    outcome = engine.load(match).outcome
    assert outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
    settle(engine)
    counters = remote_counters(engine)
    assert counters.lent_bytes == counters.read_bytes > 0
    assert lab.remote.calls["read"] == 0
    assert len(lending(lab).loans) > 0


def test_it_is_lent_anew_for_each_load_and_nothing_of_it_is_matched_in_dram(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    for _ in range(3):
        match = engine.match(engine.sequence(FIVE))
        assert tiers_of(match) == [Tier.REMOTE] * 5
        engine.load(match)
        settle(engine)
    assert len(lending(lab).loans) == 15


def test_what_was_lent_and_is_gone_once_it_was_read_does_not_count(lab: RemoteLab) -> None:
    """The bytes verified, and may have been another chunk's when they were unpacked."""
    engine = lab.filled(FIVE, dram_chunks=0)
    loading, plans = poised(lab, engine)
    lending(lab).gone = True
    for loan in lending(lab).loans:
        loan.data[:] = bytes(len(loan.data))
    for plan in plans:
        engine.execute(plan)
    outcome = engine.drive(loading)
    assert outcome.end_token == 0
    assert {miss.reason for miss in outcome.misses} == {MissReason.UNAVAILABLE}


def test_b78_a_flipped_bit_in_what_is_lent_is_a_miss_and_deleted(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    spoil(lab, 2)
    loading = engine.load(engine.match(engine.sequence(FIVE)))
    assert loading.outcome.end_token == 2 * CHUNK
    assert {miss.reason for miss in loading.outcome.misses} == {MissReason.CORRUPT}
    wait_until(lambda: len(lab.remote.objects()) == 4, "what is damaged stays")


def test_what_fails_its_checksum_after_its_lender_has_gone_is_nobodys_fault(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    spoil(lab, 2)
    lending(lab).gone = True
    outcome = engine.drive(begun(engine))
    assert outcome.end_token == 0
    assert MissReason.CORRUPT not in {miss.reason for miss in outcome.misses}
    settle(engine)
    assert len(lab.remote.objects()) == 5
    assert lab.remote.calls["delete"] == 0


def begun(engine: EngineDouble) -> Loading:
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    return loading


def spoil(lab: RemoteLab, which: int) -> None:
    """Have one bit of one of the loans be another one than was stored."""
    spoilt: list[ToyLoan] = []

    def flip(outcomes: list[object]) -> list[object]:
        for loan in lending(lab).loans[which : which + 1]:
            if not spoilt:
                loan.data[-4096] ^= 1  # Where the last section begins.
                spoilt.append(loan)
        return outcomes

    lab.remote.twist["lend"] = flip


def test_what_is_not_lent_is_copied_and_the_remote_left_alone_for_a_while(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.filled(FIVE, dram_chunks=0, clock=clock)
    lending(lab).refuses = True
    load_all(engine)
    counters = remote_counters(engine)
    assert (counters.lent_bytes, counters.read_bytes) == (0, 5 * CHUNK_BYTES)
    asked = lab.remote.calls["lend"]
    lending(lab).refuses = False
    load_all(engine)
    assert lab.remote.calls["lend"] == asked
    clock.advance(LEND_PAUSE_S)
    load_all(engine)
    assert remote_counters(engine).lent_bytes == 5 * CHUNK_BYTES


def test_what_is_encoded_is_copied(lab: RemoteLab) -> None:
    writer = lab.open(byte_codec="zstd")
    writer.store(writer.sequence(FIVE))
    written(writer)
    lab.close(writer)
    engine = lab.open(dram_chunks=0)
    load_all(engine)
    assert remote_counters(engine).lent_bytes == 0


def test_a_shard_that_is_not_there_is_a_miss(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    match = engine.match(engine.sequence(FIVE))
    (third,) = chunk_of(match.hits[3].key, lab.remote.objects())
    lab.remote.drop(third)
    loading = engine.load(match)
    assert loading.outcome.end_token == 3 * CHUNK
    assert {miss.reason for miss in loading.outcome.misses} == {MissReason.ABSENT}


def test_a_worker_that_reads_page_locked_memory_alone_has_it_copied(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    engine.cache.window.open(0, reads=False)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    assert lab.remote.calls["lend"] == 0


def test_with_one_such_worker_it_is_copied_for_all(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, layout=SPLIT, dram_chunks=0, placements=ranks(2))
    engine.cache.window.open(1, reads=False)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    assert lab.remote.calls["lend"] == 0


def test_a_dram_tier_keeps_what_comes_and_borrows_nothing(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    load_all(engine)
    assert tiers_of(engine.match(engine.sequence(FIVE))) == [Tier.DRAM] * 5
    assert lab.remote.calls["lend"] == 0
    lab.close(engine)


def test_b90_a_load_that_is_cancelled_gives_back_what_it_borrowed(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    loading, plans = poised(lab, engine)
    loading.load.cancel()
    held = lending(lab).lent
    assert held >= len({move.slot.offset for plan in plans for move in plan.moves}) > 0
    for plan in plans:
        engine.execute(plan)
    assert engine.drive(loading).end_token == 0


def test_a_lender_that_hangs_is_waited_for_until_the_deadline_and_pays_late(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.filled(FIVE, dram_chunks=0, clock=clock, deadline_s=60.0)
    match = engine.match(engine.sequence(FIVE))
    lab.remote.hold("lend")
    loading = engine.begin_load(match)
    assert loading is not None
    lab.remote.wait_for_calls("lend", 1)
    clock.advance(6.0)
    outcome = engine.drive(loading)
    assert {miss.reason for miss in outcome.misses} == {MissReason.DEADLINE}
    assert outcome.end_token == 0
    lab.remote.release()


def test_what_is_stored_is_written_below_and_leaves(lab: RemoteLab) -> None:
    engine = lab.open(dram_chunks=0)
    assert engine.store(engine.sequence(FIVE))
    written(engine)
    wait_until(lambda: empty(engine), "what is written stays")
    assert len(lab.remote.objects()) == 5
    assert remote_counters(engine).refused_chunks == {}
    assert tiers_of(engine.match(engine.sequence(FIVE))) == [Tier.REMOTE] * 5


def test_what_the_remote_holds_is_not_packed_again(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    sequence = engine.sequence(FIVE)
    engine.load(engine.match(sequence))
    assert engine.begin_store(sequence, range(5)) is None


def test_what_is_still_to_be_written_gives_way_to_nothing(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt does not push its own beginning out: what has no room is refused."""
    room = 8 * CHUNK_BYTES
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", room)
    engine = lab.open(dram_chunks=0)
    lab.remote.hold("contains")
    sequence = engine.sequence(FIVE)
    assert engine.store(sequence)
    assert sequence.refused is MissReason.CROWDED
    dram = tier_stats(engine.cache, Tier.DRAM)
    assert dram.used_bytes == room * STORE_STAGING_SHARE, "the rest is for what is loaded"
    other = engine.sequence(tokens_of(2, start=1000))
    for _ in range(3):
        assert not engine.store(other)
    refused = tier_stats(engine.cache, Tier.DRAM).counters.refused_chunks
    assert refused == {MissReason.CROWDED: 1 + 2}, "each counts once"
    lab.remote.release()
    written(engine)
    assert len(lab.remote.objects()) == 4
    wait_until(lambda: engine.store(other), "there is no room")
    written(engine)


def test_what_is_owed_to_a_remote_that_fails_gives_way(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk goes on beside it, through the same staging area."""
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", 4 * CHUNK_BYTES)
    engine = lab.open(dram_chunks=0, disk_chunks=64)
    lab.remote.twist["contains"] = fails
    for start in range(1000, 13_000, 1000):
        sequence = engine.sequence(tokens_of(1, start=start))
        wait_until(lambda: engine.store(sequence), "there is no room")  # noqa: B023
    wait_until(lambda: tier_stats(engine.cache, Tier.DISK).chunks == 12, "not all are written")
    assert not lab.remote.objects()
    lab.remote.twist.clear()


def fails(answer: object) -> object:
    raise ConnectorUnavailableError("it is down")


def test_a_disk_alone_is_read_and_written_through_a_staging_area(tmp_path: Path) -> None:
    with remote_lab(tmp_path) as lab:
        lab.remotes = []
        for turn in range(2):
            engine = lab.open(dram_chunks=0, disk_chunks=64)
            sequence = engine.sequence(FIVE)
            if turn == 0:
                assert engine.store(sequence)
            wait_until(lambda: engine.cache.stats().writes_queued == 0, "not written")  # noqa: B023
            wait_until(lambda: empty(engine), "what is written stays")  # noqa: B023
            match = engine.match(sequence)
            assert tiers_of(match) == [Tier.DISK] * 5
            assert engine.load(match).outcome.tokens_by_tier == {Tier.DISK: len(FIVE)}
            wait_until(lambda: empty(engine), "what was read stays")  # noqa: B023
            lab.close(engine)


def test_nothing_can_be_pinned_where_nothing_stays(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    outcome = engine.cache.pins.pin(engine.match(engine.sequence(FIVE)), seconds=60.0)
    assert outcome.tokens == 0


def test_prefetches_bring_nothing_up(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    assert not engine.cache.prefetch(engine.match(engine.sequence(FIVE)))
