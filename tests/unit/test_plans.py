"""A plan counts when all of its workers did all of it."""

from __future__ import annotations

import pytest

from kvtier.cache.plans import OpenPlans
from kvtier.types import (
    Direction,
    HeadSlice,
    MissReason,
    Move,
    Plan,
    Result,
    ShardId,
    ShardLayout,
    Slot,
)

LAYOUT = ShardLayout(layers=1, kv_heads=1, k_dim=4, v_dim=4, dtype="float32", tokens=16)


def plan_for(plan_id: int, *workers: int) -> Plan:
    moves = tuple(
        Move(
            worker=worker,
            codec="raw",
            shard=ShardId(0, 0, 0),
            layout=LAYOUT,
            slot=Slot(0, 8192),
            payload_offset=4096,
            first_section=0,
            section_count=1,
            heads=HeadSlice(0, 0, 1),
            pool_layer_start=0,
            token_start=0,
            token_count=16,
            block_ids=(1,),
        )
        for worker in workers
    )
    return Plan(plan_id, Direction.LOAD, 0.0, moves)


class Room:
    def __init__(self) -> None:
        self.plans = OpenPlans()
        self.answers: list[MissReason | None] = []

    def open(self, *workers: int) -> int:
        plan_id = self.plans.new_id()
        self.plans.open(plan_for(plan_id, *workers), self.answers.append)
        return plan_id

    def answer(self, plan_id: int, worker: int, reason: MissReason | None = None) -> None:
        self.plans.answer(Result(plan_id, worker, ok=reason is None, reason=reason))


@pytest.fixture
def room() -> Room:
    return Room()


def test_numbers_are_never_given_twice(room: Room) -> None:
    numbers = [room.plans.new_id() for _ in range(100)]
    assert len(set(numbers)) == 100


def test_the_last_worker_completes_a_plan(room: Room) -> None:
    plan_id = room.open(0, 1, 2, 1)
    for worker in (1, 0):
        room.answer(plan_id, worker)
        assert room.answers == []
        assert room.plans.is_open(plan_id)
    room.answer(plan_id, 2)
    assert room.answers == [None]
    assert not room.plans.is_open(plan_id)


def test_one_failure_fails_the_plan_when_all_have_answered(room: Room) -> None:
    plan_id = room.open(0, 1)
    room.answer(plan_id, 0, MissReason.DEADLINE)
    assert room.answers == []
    room.answer(plan_id, 1)
    assert room.answers == [MissReason.DEADLINE]


def test_a_failure_without_a_reason_is_the_workers(room: Room) -> None:
    plan_id = room.open(0)
    room.plans.answer(Result(plan_id, 0, ok=False))
    assert room.answers == [MissReason.WORKER]


def test_answers_that_nobody_owes_are_ignored(room: Room) -> None:
    plan_id = room.open(0, 1)
    room.answer(plan_id, 7)
    room.answer(plan_id + 100, 0)
    room.answer(plan_id, 0)
    room.answer(plan_id, 0)
    assert room.plans.is_open(plan_id)
    room.answer(plan_id, 1)
    room.answer(plan_id, 1, MissReason.WORKER)
    assert room.answers == [None]


def test_a_second_answer_does_not_turn_success_into_failure(room: Room) -> None:
    plan_id = room.open(0, 1)
    room.answer(plan_id, 0)
    room.answer(plan_id, 0, MissReason.WORKER)
    room.answer(plan_id, 1)
    assert room.answers == [None]


def test_what_a_lost_worker_owes_has_failed(room: Room) -> None:
    both, mine, other = room.open(0, 1), room.open(1), room.open(0)
    room.plans.lose(1)
    assert room.answers == [MissReason.WORKER]
    assert [room.plans.is_open(plan_id) for plan_id in (both, mine, other)] == [True, False, True]
    room.answer(both, 0)
    room.answer(other, 0)
    assert room.answers == [MissReason.WORKER, MissReason.WORKER, None]
    room.plans.lose(1)
    assert len(room.answers) == 3


def test_an_answer_may_open_the_next_plan(room: Room) -> None:
    second = plan_for(room.plans.new_id(), 1)
    first = plan_for(room.plans.new_id(), 1)
    room.plans.open(first, lambda _: room.plans.open(second, room.answers.append))
    room.plans.lose(1)
    assert room.plans.is_open(second.plan_id)
    room.answer(second.plan_id, 1)
    assert room.answers == [None]


def test_an_empty_plan_is_a_bug(room: Room) -> None:
    with pytest.raises(AssertionError):
        room.plans.open(plan_for(1), room.answers.append)


def test_whoever_raises_when_told_keeps_nobody_else_waiting(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(reason: MissReason | None) -> None:
        raise LookupError(f"could not be settled after {reason}")

    first = plan_for(room.plans.new_id(), 1)
    room.plans.open(first, broken)
    second = room.open(1)
    room.plans.lose(1)
    assert room.answers == [MissReason.WORKER]
    assert not room.plans.is_open(first.plan_id)
    assert not room.plans.is_open(second)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)
