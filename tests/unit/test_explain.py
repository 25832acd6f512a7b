"""Why each token of a prompt was loaded or computed, as the client is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier.cache.worth.cost import Reason
from kvtier.types import MissReason, Tier
from kvtier_engine.types import Why
from tests.lib.toy_engine import ToyEngine, prompt_of


def told(engine: ToyEngine, prompt: Sequence[int]) -> list[tuple[int, int, Tier | None, bool, str]]:
    """Serve a prompt and return the reasons, which make up all of it."""
    answer = engine.send(replace(engine.request(prompt, 2), explain=True))
    engine.finish()
    answer.check()
    why: Sequence[Why] = answer.usage.why
    ends = [0, *(each.end_token for each in why)]
    assert [each.start_token for each in why] == ends[:-1]
    assert ends[-1] == len(prompt)
    loaded = sum(each.end_token - each.start_token for each in why if each.loaded)
    assert loaded == answer.cached
    return [(e.start_token, e.end_token, e.tier, e.loaded, e.reason) for e in why]


def stored(length: int = 21) -> ToyEngine:
    engine = ToyEngine(tiers=True)
    engine.run(prompt_of(1, length), 1)
    engine.lose_hbm()
    return engine


def test_nothing_is_known_of_a_new_prompt() -> None:
    assert told(ToyEngine(tiers=True), prompt_of(1, 9)) == [(0, 9, None, False, MissReason.ABSENT)]
    assert told(ToyEngine(), prompt_of(1, 9)) == [(0, 9, None, False, MissReason.ABSENT)]


def test_what_was_loaded_and_what_was_never_stored() -> None:
    assert told(stored(), prompt_of(1, 21)) == [
        (0, 20, Tier.DRAM, True, Reason.FASTER),
        (20, 21, None, False, MissReason.ABSENT),
    ]


def test_what_was_not_worth_it() -> None:
    engine = stored()
    engine.tiers.costs.worth_tokens = 8
    assert told(engine, prompt_of(1, 21)) == [
        (0, 8, Tier.DRAM, True, Reason.FASTER),
        (8, 20, Tier.DRAM, False, Reason.SLOWER),
        (20, 21, None, False, MissReason.ABSENT),
    ]


def test_b161_where_nothing_is_worth_it_no_load_begins() -> None:
    engine = stored()
    engine.tiers.costs.worth_tokens = 0
    assert told(engine, prompt_of(1, 21))[0] == (0, 20, Tier.DRAM, False, Reason.SLOWER)
    assert engine.tiers.loads == []


def test_what_failed_under_way() -> None:
    engine = stored()
    engine.tiers.failing_chunks = {3}
    assert told(engine, prompt_of(1, 21)) == [
        (0, 12, Tier.DRAM, True, Reason.FASTER),
        (12, 20, Tier.DRAM, False, MissReason.IO_ERROR),
        (20, 21, None, False, MissReason.ABSENT),
    ]


def test_what_was_in_the_pool() -> None:
    engine = stored()
    engine.run(prompt_of(1, 21)[:9], 1)
    assert told(engine, prompt_of(1, 21))[:2] == [
        (0, 8, Tier.HBM, True, Reason.FOUND),
        (8, 20, Tier.DRAM, True, Reason.FASTER),
    ]


def test_who_does_not_ask_is_not_told() -> None:
    engine = stored()
    assert engine.run(prompt_of(1, 21)).usage.why == ()


def test_steps_of_prefill_teach_what_computing_costs() -> None:
    engine = ToyEngine(256, tiers=True)
    engine.runner.on_step = lambda: engine.clock.advance(2.0)
    engine.run(prompt_of(1, 101), 3)
    assert engine.tiers.costs.prefills == [(0.0, 101, 2.0)]
