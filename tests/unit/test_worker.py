"""A worker alone, with plans made by hand."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import pytest
import torch

from kvtier.cache.planner import chunk_shape
from kvtier.cache.worker import CacheWorker
from kvtier.codecs.raw import RawCodec
from kvtier.testing.clock import FakeClock
from kvtier.testing.pools import TorchPool
from kvtier.types import (
    Direction,
    HeadSlice,
    MissReason,
    Move,
    Part,
    Placement,
    Plan,
    Result,
    ShardId,
    Slot,
)
from tests.lib.cache_setup import BLOCK, CHUNK, FULL, LAYOUT

SHARD = ShardId(0, 0, 0)
SHAPE = chunk_shape(LAYOUT, RawCodec())
SLOT = Slot(4096, SHAPE.sizes[SHARD])


class HeldPool(TorchPool):
    """A pool whose views are handed out one by one, with the clock moved in between."""

    def __init__(self, clock: FakeClock, step_s: float) -> None:
        super().__init__([FULL], block_count=8, block_tokens=BLOCK)
        self._clock = clock
        self._step_s = step_s

    def layer_view(self, group: int, layer: int, part: Part) -> torch.Tensor:
        self._clock.advance(self._step_s)
        return super().layer_view(group, layer, part)


@pytest.fixture
def arena() -> memoryview:
    return memoryview(mmap.mmap(-1, 64 * 4096))


@pytest.fixture
def worker(arena: memoryview) -> Iterator[CacheWorker]:
    worker = CacheWorker(Placement(3), arena)
    yield worker
    worker.close()


def pool() -> TorchPool:
    return TorchPool([FULL], block_count=8, block_tokens=BLOCK)


def move(
    worker: int = 3,
    blocks: tuple[int, ...] = (5, 2),
    section: int = 0,
    count: int = 3,
    codec: str = "raw",
) -> Move:
    return Move(
        worker=worker,
        codec=codec,
        shard=SHARD,
        layout=SHAPE.layouts[SHARD],
        slot=SLOT,
        payload_offset=SHAPE.geometries[SHARD].header_bytes,
        first_section=section,
        section_count=count,
        heads=HeadSlice(0, 0, 2),
        pool_layer_start=0,
        token_start=0,
        token_count=CHUNK,
        block_ids=blocks,
    )


def plan(*moves: Move, number: int = 1, direction: Direction = Direction.STORE) -> Plan:
    return Plan(number, direction, float("inf"), moves)


def answers(worker: CacheWorker) -> list[Result]:
    worker.close()
    return worker.poll()


def test_what_a_worker_stored_it_loads_in_the_order_of_the_plans(arena: memoryview) -> None:
    worker = CacheWorker(Placement(3), arena)
    source = pool()
    source.fill_bytes(1)
    before = source.rows(0, 1, Part.V, (5, 2)).clone()
    worker.register_pool(source)
    worker.execute(plan(move(blocks=(5, 2)), number=1))
    worker.execute(plan(move(blocks=(0, 7)), number=2, direction=Direction.LOAD))
    assert answers(worker) == [Result(1, 3, ok=True), Result(2, 3, ok=True)]
    after = source.rows(0, 1, Part.V, (0, 7))
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


def test_a_plan_for_others_is_not_answered(worker: CacheWorker) -> None:
    worker.register_pool(pool())
    worker.execute(plan(move(worker=0)))
    assert answers(worker) == []


def test_moves_of_others_are_left_to_them(worker: CacheWorker, arena: memoryview) -> None:
    worker.register_pool(pool())
    worker.execute(plan(move(worker=0, count=1), move(section=1, count=2)))
    assert answers(worker) == [Result(1, 3, ok=True)]
    start = SLOT.offset + 4096
    assert not any(arena[start : start + 4096]), "section 0 is worker 0's"
    assert any(arena[start + 4096 : start + 8192])


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (plan(move(blocks=(5, 99))), "99"),
        (plan(move(blocks=(5,))), "block"),
        (plan(move(section=2, count=2)), "3 sections"),
        (plan(move(codec="nonesuch")), "nonesuch"),
    ],
)
def test_a_plan_that_cannot_be_is_answered_with_why(
    worker: CacheWorker, bad: Plan, detail: str
) -> None:
    worker.register_pool(pool())
    worker.execute(bad)
    worker.execute(plan(move(), number=2))
    first, second = answers(worker)
    assert (first.ok, first.reason) == (False, MissReason.WORKER)
    assert detail in first.detail
    assert second == Result(2, 3, ok=True)


def test_a_bug_is_answered_and_logged(
    worker: CacheWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.execute(plan(move()))
    (result,) = answers(worker)
    assert (result.ok, result.reason) == (False, MissReason.WORKER)
    assert "a plan before a pool" in result.detail
    assert "plan 1 failed" in caplog.text


def test_no_move_starts_after_the_deadline(arena: memoryview) -> None:
    """The first move takes the time that the second one would have needed."""
    clock = FakeClock(0.0)
    worker = CacheWorker(Placement(3), arena, clock=clock)
    worker.register_pool(HeldPool(clock, 1.0))
    moves = (move(count=1), move(section=1, count=1))
    worker.execute(Plan(1, Direction.STORE, 1.5, moves))
    assert answers(worker) == [Result(1, 3, ok=False, reason=MissReason.DEADLINE)]
    start = SLOT.offset + 4096
    assert any(arena[start : start + 4096])
    assert not any(arena[start + 4096 : start + 8192])


def test_close_finishes_what_was_taken_on(arena: memoryview) -> None:
    worker = CacheWorker(Placement(3), arena)
    worker.register_pool(pool())
    for number in range(20):
        worker.execute(plan(move(), number=number))
    worker.close()
    worker.close()
    assert [result.plan_id for result in worker.poll()] == list(range(20))
    assert worker.poll() == []


def test_a_pool_may_be_named_anew(worker: CacheWorker, arena: memoryview) -> None:
    worker.register_pool(pool())
    other = pool()
    other.fill_bytes(9)
    worker.register_pool(other)
    worker.execute(plan(move(blocks=(1, 0))))
    answers(worker)
    start = SLOT.offset + 4096
    stored = bytes(arena[start : start + CHUNK * FULL.k_dim * 4])
    head = other.rows(0, 0, Part.K, (1, 0))[:, 0].contiguous()
    assert stored == head.view(torch.uint8).numpy().tobytes()


def test_threads_may_submit_and_poll(worker: CacheWorker) -> None:
    worker.register_pool(pool())
    results: list[Result] = []

    def submit(first: int) -> None:
        for number in range(first, first + 25):
            worker.execute(plan(move(), number=number))
            results.extend(worker.poll())

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 25, 50, 75)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results += answers(worker)
    assert sorted(result.plan_id for result in results) == list(range(100))
