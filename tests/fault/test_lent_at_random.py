"""What is lent may go at any look: whatever is loaded is right, and in the end nothing is kept."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvtier.constants import LEND_PAUSE_S
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import SPLIT, WINDOWED, settle, tier_stats, written
from tests.lib.lending_remote import LendingRemote, ToyLoan
from tests.lib.remote_lab import RemoteLab, remote_lab, tokens_of

SEVEN = tokens_of(7)
LOADS = 40


@pytest.mark.parametrize("layout", [WINDOWED, SPLIT], ids=["windowed", "split"])
@pytest.mark.parametrize("seed", range(2))
def test_no_wrong_byte_is_loaded_while_loans_come_and_go(
    tmp_path: Path, layout: object, seed: int
) -> None:
    draws, ends = random.Random(seed), Counter[MissReason]()
    with remote_lab(tmp_path) as lab:
        remote = LendingRemote()
        lab.remotes = [remote]
        clock = FakeClock()
        engine = lab.filled(SEVEN, layout=layout, dram_chunks=0, clock=clock)  # type: ignore[arg-type]
        kept = dict(remote.objects())

        def looked_at(loan: ToyLoan) -> None:
            with remote.turn:
                if not loan.taken and draws.random() < 0.02:
                    loan.take()

        remote.looked_at = looked_at
        whole = 0
        for turn in range(LOADS):
            remote.refuses = draws.random() < 0.1
            for key in draws.sample(sorted(kept), k=turn % 3 == 0):
                remote.drop(key)
            whole += loaded(engine, draws, ends)
            restored(lab, engine, kept, clock)
        assert whole > 0, "nothing was ever loaded"
        assert MissReason.UNAVAILABLE in ends, "nothing ever went"
        assert tier_stats(engine.cache, Tier.REMOTE).counters.corrupt_shards == 0
        wait_until(lambda: not engine.cache.window.lent_bytes, "something stays lent")
        assert remote.lent == 0


def loaded(engine: EngineDouble, draws: random.Random, ends: Counter[MissReason]) -> bool:
    """Load as much as there is, or give it up halfway; tell whether all of it came."""
    match = engine.match(engine.sequence(SEVEN))
    loading = engine.begin_load(match)
    if loading is None:
        return False
    if draws.random() < 0.2:
        engine.step(loading)
        loading.load.cancel()
    outcome = engine.drive(loading)
    engine.check(loading)
    ends.update(miss.reason for miss in outcome.misses)
    return outcome.end_token == len(SEVEN)


def restored(
    lab: RemoteLab, engine: EngineDouble, kept: dict[bytes, bytes], clock: FakeClock
) -> None:
    """Put back what was dropped, and let the remote be well again."""
    settle(engine)
    written(engine)
    for key, data in kept.items():
        lab.remote.put(key, data)
    clock.advance(LEND_PAUSE_S + 60.0)
    wait_until(lambda: tier_stats(engine.cache, Tier.REMOTE).state == "ok", "it stays failing")
