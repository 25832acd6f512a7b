"""The front of a prompt is computed while what comes behind is loaded; the tokens are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.cache.worth.cost import Reason
from kvtier.types import MissReason, Tier
from kvtier_engine.scheduling import SchedulerConfig
from tests.lib.toy_engine import Answer, ToyEngine, prompt_of

PROMPT = prompt_of(1, 41)
#: Tokens that are computed while tokens 12 .. 40 are loaded.
SPLIT = 12


def stored(*, load_polls: int = 0, budget: int = 4, blocks: int = 64) -> ToyEngine:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    engine = ToyEngine(blocks, tiers=True, config=config)
    engine.run(PROMPT, 1)
    engine.lose_hbm()
    engine.tiers.load_polls = load_polls
    engine.tiers.costs.split_token = SPLIT
    engine.runner.steps.clear()
    return engine


def ask(engine: ToyEngine, max_tokens: int = 3) -> Answer:
    return engine.send(replace(engine.request(PROMPT, max_tokens), explain=True))


def fed(engine: ToyEngine) -> list[tuple[int, int]]:
    """Where each step of prefill began, and how many tokens it fed."""
    rows = [row for batch in engine.runner.steps for row in batch.rows]
    return [(row.start, len(row.token_ids)) for row in rows if row.start < len(PROMPT)]


@pytest.mark.parametrize("load_polls", [0, 1, 2, 3, 4, 30])
def test_the_front_is_computed_and_the_rest_is_loaded(load_polls: int) -> None:
    engine = stored(load_polls=load_polls)
    answer = ask(engine)
    engine.finish()
    answer.check()
    assert fed(engine) == [(0, 4), (4, 4), (8, 4), (40, 1)]
    assert answer.usage.cached_by_tier == {Tier.DRAM: 28}
    assert [(e.start_token, e.end_token, e.loaded, e.reason) for e in answer.usage.why] == [
        (0, 12, False, Reason.MEANWHILE),
        (12, 40, True, Reason.FASTER),
        (40, 41, False, MissReason.ABSENT),
    ]
    assert engine.core.stats().hit_tokens == {Tier.DRAM: 28}


@pytest.mark.parametrize("load_polls", [0, 2, 30])
@pytest.mark.parametrize("failing", [3, 5, 9])
def test_what_does_not_come_is_computed(load_polls: int, failing: int) -> None:
    engine = stored(load_polls=load_polls)
    engine.tiers.failing_chunks = {failing}
    answer = ask(engine)
    engine.finish()
    answer.check()
    assert sum(count for _, count in fed(engine)) == 12 + 41 - 4 * failing
    assert answer.cached == 4 * failing - 12


def test_what_was_loaded_behind_is_found_again_in_the_pool() -> None:
    engine = stored(load_polls=2)
    ask(engine)
    engine.finish()
    again = engine.run(PROMPT)
    assert again.usage.cached_by_tier == {Tier.HBM: 40}


def test_nothing_is_found_in_the_pool_before_it_has_come() -> None:
    engine = stored(load_polls=10)
    first = ask(engine)
    engine.step(4)
    engine.tiers.costs.split_token = None
    second = engine.submit(PROMPT, 3)
    engine.finish()
    first.check()
    second.check()


def test_b08_nothing_is_stored_before_it_has_come() -> None:
    engine = stored(load_polls=10)
    answer = ask(engine)
    engine.step()
    held = dict(engine.tiers.chunks)
    engine.tiers.chunks.clear()
    engine.step(4)
    assert len(engine.tiers.chunks) == SPLIT // 4, "of what lies behind, only garbage is there"
    engine.tiers.chunks |= held
    engine.finish()
    answer.check()
    engine.lose_hbm()
    engine.tiers.costs.split_token = None
    assert engine.run(PROMPT).cached == 40


def test_an_abort_leaves_the_blocks_to_the_load() -> None:
    engine = stored(load_polls=10)
    answer = ask(engine)
    engine.step(2)
    engine.core.abort(answer.request.request_id)
    engine.step()
    other = engine.submit(prompt_of(2, 41), 3)
    engine.finish()
    other.check()


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_b24_weights_that_change_under_way(steps: int) -> None:
    engine = stored(load_polls=10)
    answer = ask(engine)
    engine.step(steps)
    engine.lose_hbm()
    engine.finish()
    answer.check()


def test_a_preempted_request_starts_over() -> None:
    engine = stored(load_polls=8, blocks=16)
    answer = ask(engine, max_tokens=12)
    engine.step(2)
    urgent = engine.submit(prompt_of(3, 17), 12, priority=-1)
    engine.finish()
    answer.check()
    urgent.check()


def test_a_load_that_breaks_is_waited_for_and_its_blocks_are_not_used() -> None:
    engine = stored(load_polls=4)
    engine.tiers.broken.add("load.poll")
    answer = ask(engine)
    engine.step(3)
    engine.tiers.broken.clear()
    engine.finish()
    answer.check()
    assert answer.cached == 0


def test_who_is_not_alone_takes_no_time_from_others() -> None:
    engine = stored(load_polls=3, budget=64)
    other = engine.submit(prompt_of(2, 21), 8)
    engine.step()
    answer = ask(engine)
    engine.finish()
    other.check()
    answer.check()
    assert answer.usage.why[0].reason is Reason.FASTER
    assert answer.cached == 40
