"""Ranks that differ in speed and in room: none of them ever waits for another one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.worker import CacheWorker
from kvtier.testing.engine_double import wait_until
from kvtier.types import Plan, Result
from tests.lib.cache_setup import CHUNK, SPLIT, CacheSetup, cache_setup, ranks, settle

ROUNDS = 60


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def answers_of(worker: CacheWorker) -> list[Result]:
    """Wait for a worker's next answers."""
    answers: list[Result] = []

    def some() -> bool:
        answers.extend(worker.poll())
        return bool(answers)

    wait_until(some, "the worker waits")
    return answers


def test_b59_a_rank_answers_every_plan_whatever_the_others_do(setup: CacheSetup, seed: int) -> None:
    """Two ranks in one plan each; the second one is seldom asked, the first one never waits."""
    chance = random.Random(seed)
    engine = setup.open(SPLIT, placements=ranks(2), disk_chunks=None)
    stored = engine.sequence(range(4 * CHUNK))
    engine.store(stored)
    owed: list[Plan] = []
    loads = []
    fast, slow = engine.workers
    for _ in range(ROUNDS):
        match = engine.match(stored)
        load = engine.cache.begin_load(match, engine.blocks(range(match.tokens)))
        assert load is not None
        loads.append(load)
        for plan in load.poll():
            fast.execute(plan)
            owed.append(plan)
            answers = answers_of(fast)
            assert [(each.plan_id, each.ok) for each in answers] == [(plan.plan_id, True)]
            engine.cache.finish(answers)
            assert load.outcome is None, "the other rank has not answered"
        while owed and chance.random() < 0.3:
            slow.execute(owed.pop(0))
    for plan in owed:
        slow.execute(plan)

    def ended() -> bool:
        engine.cache.finish(slow.poll())
        return all(load.outcome is not None for load in loads)

    wait_until(ended, "the slow rank's answers do not end the loads")
    assert {load.outcome.end_token for load in loads if load.outcome} == {4 * CHUNK}
    settle(engine)
