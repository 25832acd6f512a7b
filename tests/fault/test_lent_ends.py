"""What is lent while something ends around it: the cache, its epoch, another load, the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.types import MissReason, Plan, Tier
from tests.lib.cache_setup import CHUNK_BYTES, SPLIT, ranks, settle, tier_stats
from tests.lib.lending_remote import LendingRemote
from tests.lib.remote_lab import RemoteLab, remote_lab, tokens_of

FIVE = tokens_of(5)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as made:
        made.remotes = [LendingRemote()]
        yield made
        for engine in made.engines:
            settle(engine)
            assert not engine.cache.window.lent_bytes
        assert lending(made).lent == 0


def lending(lab: RemoteLab) -> LendingRemote:
    assert isinstance(lab.remote, LendingRemote)
    return lab.remote


def begun(engine: EngineDouble) -> Loading:
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    return loading


def ordered(loading: Loading, chunks: int = 5) -> list[Plan]:
    """The plans of a load of which all is verified and nothing moved yet."""
    plans: list[Plan] = []

    def all_are() -> bool:
        plans.extend(loading.load.poll())
        return len({move.slot.offset for plan in plans for move in plan.moves}) >= chunks

    wait_until(all_are, "not all is ordered")
    return plans


def carried(engine: EngineDouble, loading: Loading, plans: list[Plan]) -> None:
    for plan in plans:
        engine.execute(plan)
    engine.drive(loading)
    engine.check(loading)


def test_a_cache_that_closes_while_workers_read_what_is_lent(lab: RemoteLab) -> None:
    """The worker's memory stays until it has done; nothing of it counts."""
    engine = lab.filled(FIVE, dram_chunks=0)
    loading = begun(engine)
    plans = ordered(loading)
    lab.engines.remove(engine)
    engine.cache.close(timeout_s=5.0)
    for plan in plans:
        engine.execute(plan)
    outcome = engine.drive(loading)
    assert outcome.end_token == 0
    engine.close()
    assert lending(lab).lent == 0


def test_an_epoch_that_ends_while_it_is_lent(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    loading = begun(engine)
    plans = ordered(loading)
    engine.cache.invalidate(engine.sequence(FIVE).namespace)
    assert loading.load.outcome is None, "workers still write to its blocks"
    carried(engine, loading, plans)
    assert loading.outcome.end_token == 0
    assert not engine.match(engine.sequence(FIVE)).hits


@pytest.mark.parametrize("first_ends", ["cancel", "deadline", "carried"])
def test_a_second_load_of_what_is_lent_to_a_first(lab: RemoteLab, first_ends: str) -> None:
    """It begins once the first has verified all, and borrows for itself."""
    clock = FakeClock()
    engine = lab.filled(FIVE, dram_chunks=0, clock=clock)
    first = begun(engine)
    plans = ordered(first)
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == 0, "fills do not end")
    second = begun(engine)
    if first_ends == "cancel":
        first.load.cancel()
    if first_ends == "deadline":
        clock.advance(4.0)
    for loan in lending(lab).loans[:5]:
        loan.take()
    others = ordered(second)
    carried(engine, first, plans)
    assert first.outcome.end_token == 0
    for plan in others:
        engine.execute(plan)
    assert engine.drive(second).end_token == len(FIVE)
    (pool,) = engine.ranks
    pool.check(second.match.sequence.chunk_keys, second.blocks, FIVE)


def test_who_follows_a_load_that_leaves_gets_all_of_it(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    lab.remote.hold("lend")
    first = begun(engine)
    lab.remote.wait_for_calls("lend", 1)
    second = begun(engine)
    first.load.poll()
    second.load.poll()
    first.load.cancel()
    lab.remote.release()
    assert engine.drive(second).end_token == len(FIVE)
    engine.check(second)
    assert engine.drive(first).end_token == 0


def test_keys_that_are_removed_while_they_are_lent(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    lab.remote.hold("lend")
    loading = begun(engine)
    lab.remote.wait_for_calls("lend", 1)
    keys = [hit.key for hit in loading.match.hits]
    gone = engine.cache.remove(keys)
    lab.remote.release()
    engine.drive(loading)
    engine.check(loading)
    assert loading.outcome.end_token % (len(FIVE) // 5) == 0
    wait_until(lambda: all(engine.cache.remove(keys)), "they do not go")
    assert not all(gone), "what is coming went"
    wait_until(lambda: not lab.remote.objects(), "they stay there")


def test_a_deadline_that_comes_while_workers_read(lab: RemoteLab) -> None:
    """What is unpacked by then is right, and nothing is written to a block later."""
    clock = FakeClock()
    engine = lab.filled(FIVE, dram_chunks=0, clock=clock)
    loading = begun(engine)
    plans = ordered(loading)
    clock.advance(6.0)
    carried(engine, loading, plans)
    assert {miss.reason for miss in loading.outcome.misses} <= {MissReason.DEADLINE}


def test_one_of_two_workers_reads_too_late(lab: RemoteLab) -> None:
    """The loan has gone between the two: no token counts, though one worker's bytes were right."""
    engine = lab.filled(FIVE, layout=SPLIT, dram_chunks=0, placements=ranks(2))
    loading = begun(engine)
    plans = ordered(loading)
    lending(lab).loans[3].take()
    carried(engine, loading, plans)
    assert loading.outcome.end_token < len(FIVE)
    assert {miss.reason for miss in loading.outcome.misses} == {MissReason.UNAVAILABLE}


def test_what_is_borrowed_leaves_a_staging_area_to_stores(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", 4 * CHUNK_BYTES)
    engine = lab.filled(FIVE, dram_chunks=0)
    lab.remote.hold("lend")
    loading = begun(engine)
    lab.remote.wait_for_calls("lend", 1)
    assert engine.cache.window.lent_bytes > 2 * CHUNK_BYTES
    assert engine.store(engine.sequence(tokens_of(1, start=5000))), "it takes nothing of the arena"
    lab.remote.release()
    engine.drive(loading)
    assert loading.outcome.end_token == len(FIVE)


CHANGES: dict[str, Callable[[LendingRemote], None]] = {
    "gone": lambda remote: setattr(remote, "gone", True),
    "first-taken": lambda remote: remote.loans[0].take(),
    "last-taken": lambda remote: remote.loans[-1].take(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("look", range(1, 16, 2))
def test_b98_whatever_look_finds_a_loan_gone_no_wrong_byte_counts(
    lab: RemoteLab, change: Callable[[LendingRemote], None], look: int
) -> None:
    engine = lab.filled(FIVE, dram_chunks=0)
    remote, looks = lending(lab), 0

    def looked_at(_: object) -> None:
        nonlocal looks
        with remote.turn:
            looks += 1
            if looks == look:
                change(remote)

    remote.looked_at = looked_at
    loading = begun(engine)
    engine.drive(loading)
    engine.check(loading)
    assert looks >= look, "it was never taken away"
    remote.looked_at = lambda _: None
    remote.gone = False
