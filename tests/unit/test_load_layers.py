"""Which of the model's layers a load has brought, while the rest is under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvtier.cache import load as load_module
from kvtier.constants import LOAD_PLAN_BYTES, LOAD_PLANS_MAX
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.types import KVLayout, Plan, Result
from tests.lib.cache_setup import (
    CHUNK,
    LAYOUT,
    STAGED,
    WINDOWED,
    CacheSetup,
    begun,
    cache_setup,
    fails,
    ranks,
)

FOUR = range(4 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


@pytest.fixture(autouse=True)
def _small_plans() -> Iterator[None]:
    """As if these few bytes were many, and many plans no burden."""
    with mock.patch.multiple(load_module, LOAD_PLAN_BYTES=4096, LOAD_PLANS_MAX=8):
        yield


def stored(setup: CacheSetup, layout: KVLayout = LAYOUT, *, stages: int = 1) -> EngineDouble:
    engine = setup.open(layout, placements=ranks(1, stages))
    engine.store(engine.sequence(FOUR))
    return engine


def answer(engine: EngineDouble, plan: Plan) -> None:
    engine.execute(plan)

    def done() -> bool:
        engine.finish()
        return engine.cache.store_done(plan.plan_id)

    wait_until(done, "a plan is not answered")


def model_layers(layout: KVLayout, plan: Plan) -> list[int]:
    """The model's layers of a plan's moves, of one stage."""
    return [
        layout.groups[move.shard.group].layers[section * layout.section_layers]
        for move in plan.moves
        for section in range(move.first_section, move.first_section + move.section_count)
    ]


def ready_after_each(engine: EngineDouble, loading: Loading, plans: list[Plan]) -> list[int]:
    seen = [loading.load.layers_ready]
    for plan in plans:
        answer(engine, plan)
        seen.append(loading.load.layers_ready)
    return seen


def test_the_first_layers_of_all_chunks_go_before_the_later_ones(setup: CacheSetup) -> None:
    engine = stored(setup)
    loading = begun(engine, FOUR)
    plans = loading.load.poll()
    assert [sorted(set(model_layers(LAYOUT, plan))) for plan in plans] == [[0], [1], [2]]
    assert all(len(plan.moves) == 4 for plan in plans)
    assert ready_after_each(engine, loading, plans) == [0, 1, 2, 3]
    engine.drive(loading)
    engine.check(loading)
    assert loading.load.layers_ready == 3


def test_layers_are_counted_over_all_groups(setup: CacheSetup) -> None:
    engine = stored(setup, WINDOWED)
    loading = begun(engine, FOUR)
    plans = loading.load.poll()
    order = [layer for plan in plans for layer in sorted(set(model_layers(WINDOWED, plan)))]
    assert order == sorted(order)
    seen = ready_after_each(engine, loading, plans)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 5)
    engine.drive(loading)


def test_a_plan_that_overtakes_another_counts_when_both_are_in(setup: CacheSetup) -> None:
    engine = stored(setup)
    loading = begun(engine, FOUR)
    first, second, third = loading.load.poll()
    answer(engine, second)
    assert loading.load.layers_ready == 0
    answer(engine, first)
    assert loading.load.layers_ready == 2
    answer(engine, third)
    engine.drive(loading)
    engine.check(loading)


def test_every_stage_and_rank_counts(setup: CacheSetup) -> None:
    engine = stored(setup, STAGED, stages=2)
    loading = begun(engine, FOUR)
    plans = loading.load.poll()
    seen = ready_after_each(engine, loading, plans)
    assert (seen[0], seen[-1]) == (0, 3)
    assert seen == sorted(seen)
    engine.drive(loading)


def test_a_plan_that_fails_leaves_the_layers_of_what_still_counts(setup: CacheSetup) -> None:
    engine = stored(setup)
    loading = begun(engine, FOUR)
    plans = loading.load.poll()
    engine.cache.finish([fails(plans[0])])
    for plan in plans[1:]:
        answer(engine, plan)
    assert engine.drive(loading).end_token == 0


def test_nothing_is_ready_before_a_chunk_from_below_has_begun_to_come(setup: CacheSetup) -> None:
    engine = setup.on_disk(FOUR)
    loading = begun(engine, FOUR)
    assert loading.load.layers_ready == 0
    engine.drive(loading)
    engine.check(loading)
    assert loading.load.layers_ready == 3


def test_little_goes_in_one_plan_and_much_in_a_few(setup: CacheSetup) -> None:
    engine = stored(setup)
    with mock.patch.object(load_module, "LOAD_PLAN_BYTES", LOAD_PLAN_BYTES):
        loading = begun(engine, FOUR)
        (plan,) = loading.load.poll()
    engine.cache.finish([Result(plan.plan_id, 0, ok=True)])
    with mock.patch.multiple(load_module, LOAD_PLAN_BYTES=1, LOAD_PLANS_MAX=LOAD_PLANS_MAX):
        other = begun(engine, FOUR)
        plans = other.load.poll()
    assert 1 < len(plans) <= LOAD_PLANS_MAX
    for each in plans:
        engine.execute(each)
    engine.drive(other)
