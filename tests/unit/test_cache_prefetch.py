"""Bringing up what a queued request will load, before it has blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import PREFETCH_CHUNKS_INFLIGHT_MAX, PREFETCHES_MAX
from kvtier.errors import ConnectorUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK, settle, tier_stats, written
from tests.lib.remote_lab import RemoteLab, remote_lab, tiers_of, tokens_of

TWELVE = tokens_of(12)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def test_what_a_remote_holds_is_in_dram_before_there_are_blocks(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    match = engine.match(engine.sequence(TWELVE))
    assert engine.cache.prefetch(match)
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == 12, "it does not come")
    settle(engine)
    assert not engine.cache.prefetch(match), "nothing is left to be done"
    again = engine.match(engine.sequence(TWELVE))
    assert tiers_of(again) == [Tier.DRAM] * 12
    assert engine.load(again).outcome.tokens_by_tier == {Tier.DRAM: len(TWELVE)}


def test_what_a_disk_holds_comes_up_too(lab: RemoteLab) -> None:
    engine = lab.open(disk_chunks=16)
    engine.store(engine.sequence(TWELVE))
    written(engine)
    lab.close(engine)
    lab.remotes.clear()
    engine = lab.open(disk_chunks=16)
    assert engine.cache.prefetch(engine.match(engine.sequence(TWELVE)))
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == 12, "it does not come")


def test_what_was_brought_up_for_a_request_counts_for_the_tier_it_lay_in(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    mine, other = engine.sequence(TWELVE), engine.sequence(TWELVE)
    assert engine.cache.prefetch(engine.match(mine))
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == 12, "it does not come")
    settle(engine)
    again = engine.match(mine)
    assert tiers_of(again) == [Tier.DRAM] * 12, "what it costs to load is what counts there"
    engine.cache.note_admission(again, 0, len(TWELVE))
    assert engine.load(again).outcome.tokens_by_tier == {Tier.REMOTE: len(TWELVE)}
    dram, remote = (tier_stats(engine.cache, tier).counters for tier in (Tier.DRAM, Tier.REMOTE))
    assert dict(dram.miss_tokens) == {MissReason.ABSENT: len(TWELVE)}
    assert (dram.hit_tokens, remote.hit_tokens) == (0, len(TWELVE))
    found = engine.load(engine.match(other)).outcome.tokens_by_tier
    assert found == {Tier.DRAM: len(TWELVE)}, "that one found it there"


def test_what_left_dram_meanwhile_comes_from_where_it_lies(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE, dram_chunks=12)
    mine = engine.sequence(TWELVE)
    assert engine.cache.prefetch(engine.match(mine))
    settle(engine)
    engine.store(engine.sequence(tokens_of(12, start=1000)))
    written(engine)
    match = engine.match(mine)
    assert Tier.REMOTE in tiers_of(match)
    assert engine.load(match).outcome.tokens_by_tier == {Tier.REMOTE: len(TWELVE)}


def test_few_chunks_are_on_their_way_at_a_time(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    match = engine.match(engine.sequence(TWELVE))
    lab.remote.batches.clear()
    lab.remote.hold("read")
    engine.cache.prefetch(match)
    lab.remote.wait_for_calls("read", 1)
    assert tier_stats(engine.cache, Tier.DRAM).pinned_chunks == PREFETCH_CHUNKS_INFLIGHT_MAX
    assert lab.remote.count("read") <= PREFETCH_CHUNKS_INFLIGHT_MAX


def test_a_load_follows_what_is_coming_up(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    match = engine.match(engine.sequence(TWELVE))
    lab.remote.batches.clear()
    lab.remote.hold("read")
    engine.cache.prefetch(match)
    loading = engine.begin_load(match)
    assert loading is not None
    loading.load.poll()
    lab.remote.release()
    assert engine.drive(loading).end_token == len(TWELVE)
    assert lab.remote.count("read") == 12


def test_it_takes_a_part_of_dram_and_no_more(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE, dram_chunks=8)
    hot = engine.sequence(tokens_of(3, start=1000))
    engine.store(hot)
    assert engine.cache.prefetch(engine.match(engine.sequence(TWELVE)))
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == 7, "it does not come")
    settle(engine)
    assert tier_stats(engine.cache, Tier.DRAM).chunks == 7
    assert engine.match(hot).tokens == 3 * CHUNK


def test_it_ends_at_the_first_chunk_that_does_not_come(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    match = engine.match(engine.sequence(TWELVE))
    lab.remote.batches.clear()
    lab.remote.twist["read"] = lambda answer: [ConnectorUnavailableError("away") for _ in answer]
    engine.cache.prefetch(match)
    settle(engine)
    assert tier_stats(engine.cache, Tier.DRAM).chunks == 0
    assert lab.remote.count("read") <= 3 * 2 * PREFETCH_CHUNKS_INFLIGHT_MAX


def test_their_number_is_bounded(lab: RemoteLab) -> None:
    engine = lab.filled(tokens_of(PREFETCHES_MAX + 1), dram_chunks=200)
    sequences = []
    for number in range(PREFETCHES_MAX + 1):
        sequence = engine.sequence(tokens_of(1, start=1000 + 100 * number))
        engine.store(sequence)
        sequences.append(sequence)
    written(engine)
    lab.close(engine)
    engine = lab.open(dram_chunks=200)
    matches = [
        engine.match(engine.sequence(tokens_of(1, start=1000 + 100 * number)))
        for number in range(PREFETCHES_MAX + 1)
    ]
    lab.remote.hold("read")
    begun = [engine.cache.prefetch(match) for match in matches]
    assert begun == [True] * PREFETCHES_MAX + [False]
    lab.remote.release()
    settle(engine)
    assert engine.cache.prefetch(matches[-1])


def test_b90_one_that_is_overdue_or_stale_leaves_nothing_behind(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.filled(TWELVE, clock=clock)
    match = engine.match(engine.sequence(TWELVE))
    for end in ("deadline", "invalidate"):
        lab.remote.hold("read")
        assert engine.cache.prefetch(match, deadline=clock.now() + 1.0)
        if end == "deadline":
            clock.advance(1.0)
        else:
            engine.cache.invalidate(engine.namespace)
        lab.remote.release()
        settle(engine)
        assert tier_stats(engine.cache, Tier.DRAM).chunks < 12
    assert not engine.cache.prefetch(match)


def test_close_while_one_is_under_way(lab: RemoteLab) -> None:
    engine = lab.filled(TWELVE)
    engine.cache.prefetch(engine.match(engine.sequence(TWELVE)))
    lab.engines.remove(engine)
    engine.close()
    engine.cache.close()
    assert not engine.cache.prefetch(engine.match(engine.sequence(TWELVE)))
