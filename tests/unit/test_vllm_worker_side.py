"""A rank's side of the plug for vLLM: each load is told once, each plan answered."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.cache.worker import CacheWorker
from kvtier.types import (
    Direction,
    HeadSlice,
    MissReason,
    Move,
    Placement,
    Plan,
    Result,
    ShardId,
    ShardLayout,
    Slot,
)
from kvtier_adapters.vllm.geometry import Geometry
from kvtier_adapters.vllm.loads import load_units, newly_ordered
from kvtier_adapters.vllm.messages import Answers, LoadEnd, LoadOrder, Orders
from kvtier_adapters.vllm.worker_side import WorkerSide
from tests.lib.vllm_double import double_geometry

SHARD = ShardLayout(layers=8, kv_heads=2, k_dim=8, v_dim=8, dtype="float32", tokens=8)


def move(sections: range, *, chunk: int = 0, worker: int = 0) -> Move:
    return Move(
        worker=worker,
        codec="raw",
        shard=ShardId(0, 0, worker),
        layout=SHARD,
        slot=Slot(0, 4096),
        payload_offset=4096,
        first_section=sections.start,
        section_count=len(sections),
        heads=HeadSlice(0, 0, 2),
        pool_layer_start=0,
        token_start=0,
        token_count=8,
        block_ids=(1, 2),
        position_start=chunk * 8,
    )


def plan(number: int, *moves: Move, worker: int = 0) -> Plan:
    return Plan(number, Direction.LOAD, 1e9, moves or (move(range(1), worker=worker),))


class Hands(CacheWorker):
    """A worker that keeps its plans; the test answers them."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.results: list[Result] = []
        self.broken = False

    def execute(self, plan: Plan) -> None:
        if self.broken:
            raise OSError("no stream")
        self.plans.append(plan)

    def poll(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    def answer(self, number: int, *, ok: bool = True) -> None:
        self.results.append(Result(number, 0, ok))

    def close(self) -> None:
        self.plans.clear()


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def side(hands: Hands) -> WorkerSide:
    side = WorkerSide(Placement())
    side.serve(lambda _orders: hands)
    return side


def order(*plans: Plan, last: bool) -> Orders:
    return Orders(loads=(LoadOrder(1, "request", plans, last),))


def end(*bad: int) -> Orders:
    return Orders(ends=(LoadEnd(1, "request", bad),))


def test_a_load_is_told_as_soon_as_its_last_plan_is_done(side: WorkerSide, hands: Hands) -> None:
    side.execute(order(plan(1), last=False))
    hands.answer(1)
    assert side.take_received() == set()
    side.execute(order(plan(2), plan(3), last=True))
    hands.answer(2)
    assert side.take_received() == set()
    hands.answer(3)
    assert side.take_received() == {"request"}
    assert [each.plan_id for each in side.take_answers().results] == [1, 2, 3]


def test_the_end_of_a_load_that_was_told_says_nothing_more(side: WorkerSide, hands: Hands) -> None:
    side.execute(order(plan(1), last=True))
    hands.answer(1)
    assert side.take_received() == {"request"}
    side.execute(end())
    assert side.take_received() == set()


def test_a_load_with_a_plan_that_failed_waits_for_its_end(side: WorkerSide, hands: Hands) -> None:
    side.execute(order(plan(1), plan(2), last=True))
    hands.answer(1, ok=False)
    hands.answer(2)
    assert side.take_received() == set()
    side.execute(end(5, 6))
    assert side.take_received() == {"request"}
    assert side.take_bad_blocks() == {5, 6}
    assert side.take_bad_blocks() == set()


def test_a_load_of_which_nothing_was_ordered_ends_all_the_same(side: WorkerSide) -> None:
    side.execute(end(7))
    assert side.take_received() == {"request"}
    assert side.take_bad_blocks() == {7}


def test_plans_for_other_ranks_are_not_waited_for(side: WorkerSide) -> None:
    side.execute(order(plan(1, worker=1), last=True))
    assert side.take_received() == {"request"}
    assert side.take_answers() == Answers()


def test_a_refusal_answers_every_plan_and_is_told_once(side: WorkerSide) -> None:
    side.refuse("an unknown layout")
    side.refuse("something else")
    side.execute(order(plan(1), last=True))
    side.execute(Orders(stores=(plan(2),)))
    answers = side.take_answers()
    assert [(each.plan_id, each.ok, each.reason) for each in answers.results] == [
        (1, False, MissReason.WORKER),
        (2, False, MissReason.WORKER),
    ]
    assert answers.refusals == ("an unknown layout",)
    assert side.take_received() == set()
    assert not side.take_answers()


def test_a_worker_that_cannot_be_made_is_a_refusal() -> None:
    side = WorkerSide(Placement(1, 1, 2))

    def fail(orders: Orders) -> CacheWorker:
        raise FileNotFoundError("the arena's owner is gone")

    side.serve(fail)
    side.open(Orders())
    assert side.take_answers().refusals == ("rank 1: FileNotFoundError: the arena's owner is gone",)


def test_a_plan_that_is_not_taken_on_is_answered(side: WorkerSide, hands: Hands) -> None:
    hands.broken = True
    side.execute(order(plan(1), last=True))
    (result,) = side.take_answers().results
    assert (result.ok, result.detail) == (False, "OSError('no stream')")
    assert side.take_received() == set()


def test_ranks_answers_are_merged() -> None:
    one, other = Result(1, 0, ok=True), Result(1, 1, ok=True)
    both = Answers((one,)).merged(Answers((other,), ("no",)))
    assert both == Answers((one, other), ("no",))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_sections_of_all_chunks_make_a_whole_load(ranks: int) -> None:
    geometry: Geometry = double_geometry(ranks, 4, 8)
    layout = geometry.layout(8)
    # Two layers are one section; with more ranks than heads each rank has a head of its own copy.
    assert load_units(layout, ranks, range(8, 32), 4) == 24 * max(2, ranks)


def test_what_is_moved_twice_counts_once() -> None:
    ordered: set[Any] = set()
    assert newly_ordered([plan(1, move(range(2)))], ordered) == 2 * 8 * 2
    # Another tier brings the same chunk again, and the next one for the first time.
    again = [plan(2, move(range(2)), move(range(1), chunk=1))]
    assert newly_ordered(again, ordered) == 8 * 2
    assert newly_ordered(again, ordered) == 0
