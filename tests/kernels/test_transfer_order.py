"""In which order a lane gives its two queues what, with queues that do it at once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from kvtier.errors import CodecError
from kvtier.testing.pools import TorchPool
from kvtier.types import Direction, GroupKind, KVGroup, Part, ShardLayout
from tests.lib.host_queues import (
    DEVICE,
    made_codec,
    made_mark,
    made_move,
    made_mover,
    shipments,
)

from kvtier_kernels.transfer.lane import Way  # isort: skip

DIRECT, STAGED = Way(direct=True, programs=3), Way(direct=False, programs=2)
LAYOUT = ShardLayout(3, 2, 64, 64, "bfloat16", 16, section_layers=2)
BLOCKS = (7, 2, 19, 3)


def pool_for() -> TorchPool:
    group = KVGroup(GroupKind.FULL, (0, 1, 2), 2, 64, 64, "bfloat16")
    return TorchPool([group], block_count=24, block_tokens=4, device=DEVICE)


def marks(log: list[str], lane: str) -> list[str]:
    """All that was marked, in order."""
    found = [line.partition(" mark ") for line in log if line.startswith(lane)]
    return [
        number
        for place, _, number in found
        if number and "wait" not in place + number and "finish" not in place
    ]


def finished(log: list[str], lane: str) -> list[str]:
    """The marks that were waited for, in order."""
    start = f"{lane} finish mark "
    return [line.removeprefix(start) for line in log if line.startswith(start)]


def test_b01_nothing_starts_before_the_mark_and_all_ends_before_the_return() -> None:
    pool = pool_for()
    made = made_codec("raw", LAYOUT)
    for way in (DIRECT, STAGED):
        for direction in Direction:
            log: list[str] = []
            mover = made_mover(pool, way, log=log)
            mover.move(direction, [shipments(made, [made_move(made, LAYOUT, BLOCKS)])], "mark")
            waits = [f"{direction} {queue} wait for mark" for queue in ("kernels", "copies")]
            assert log[:2] == waits
            assert finished(log, direction) == marks(log, direction)[-2:]
            assert log[-1].startswith(f"{direction} finish")


def test_a_buffer_is_free_again_before_it_is_filled_again() -> None:
    """Of three slices, the third waits for what the first one's last user was given."""
    layout = replace(LAYOUT, section_layers=1)
    pool = pool_for()
    pool.fill_values(8)
    before = pool.rows(0, 2, Part.V, BLOCKS)
    made = made_codec("raw", layout)
    log: list[str] = []
    mover = made_mover(pool, STAGED, log=log, staging_bytes=made.section_bytes(layout, 0))
    (shipment,) = shipments(made, [made_move(made, layout, BLOCKS)])
    mover.move(Direction.STORE, [[shipment]], None)
    pool.poison()
    mover.move(Direction.LOAD, [[shipment]], None)
    assert pool.rows(0, 2, Part.V, BLOCKS).equal(before)
    for first, second in (("store kernels", "store copies"), ("load copies", "load kernels")):
        freed = [line for line in log if line.startswith(f"{second} mark")]
        assert len(freed) == 4, "three slices and the end"
        waits = [line for line in log if line.startswith(f"{first} wait for mark")]
        assert waits == [f"{first} wait for {freed[0].removeprefix(f'{second} ')}"]


@pytest.mark.parametrize("way", [DIRECT, STAGED], ids=["direct", "staged"])
def test_more_shards_than_are_laid_out_at_a_time(way: Way) -> None:
    """Each of 18 shards, of one block each, is where it belongs."""
    layout = ShardLayout(1, 1, 16, 16, "bfloat16", 4, section_layers=1)
    group = KVGroup(GroupKind.FULL, (0,), 1, 16, 16, "bfloat16")
    pool = TorchPool([group], block_count=24, block_tokens=4, device=DEVICE)
    pool.fill_values(6)
    made = made_codec("raw", layout)
    moves = [made_move(made, layout, (block,)) for block in range(18)]
    before = pool.snapshot()
    mover = made_mover(pool, way)
    batch = shipments(made, moves)
    mover.move(Direction.STORE, [batch], made_mark())
    kept = pool.rows(0, 0, Part.K, (20,))
    for part in Part:
        pool.layer_view(0, 0, part)[:18] = 0
    mover.move(Direction.LOAD, [batch], made_mark())
    assert pool.snapshot() == before
    assert pool.rows(0, 0, Part.K, (20,)).equal(kept)


def test_only_the_host_places_some_rows_in_memory_that_kernels_do_not_reach() -> None:
    """The store goes through the host, loads go over the buffer."""
    pool = pool_for()
    made = made_codec("int8", LAYOUT)
    log: list[str] = []
    mover = made_mover(pool, DIRECT, reached=False, log=log)
    pool.fill_values(4)
    for direction in Direction:
        move = made_move(made, LAYOUT, BLOCKS[:2], rows=(1, 6))
        mover.move(direction, [shipments(made, [move])], "mark")
    assert "store copies" not in log
    assert "load copies" in log


def test_b01_values_that_cannot_be_packed_fail_only_when_all_has_ended() -> None:
    pool = pool_for()
    pool.fill_values(9)
    pool.layer_view(0, 2, Part.V)[BLOCKS[3], 1, 1, 5] = float("nan")
    made = made_codec("int8", LAYOUT)
    for way in (DIRECT, STAGED):
        log: list[str] = []
        with pytest.raises(CodecError, match="int8 cannot pack"):
            made_mover(pool, way, log=log).move(
                Direction.STORE, [shipments(made, [made_move(made, LAYOUT, BLOCKS)])], "mark"
            )
        assert finished(log, "store") == marks(log, "store")[-2:]


def test_the_next_batch_is_started_before_the_last_one_is_waited_for() -> None:
    """And none is left under way where one fails, or it has become late."""
    made = made_codec("int8", LAYOUT)
    for bad, error in ((False, None), (True, CodecError)):
        pool = pool_for()
        pool.fill_values(9)
        if bad:
            pool.layer_view(0, 2, Part.V)[BLOCKS[3], 1, 1, 5] = float("nan")
        log: list[str] = []
        batch = shipments(made, [made_move(made, LAYOUT, BLOCKS)])
        asked = iter([False, False, False, True])
        with pytest.raises(error) if error else nullcontext():
            mover = made_mover(pool, DIRECT, log=log)
            late = partial(next, asked)
            assert not mover.move(Direction.STORE, [batch] * 9, "mark", late)
        waits = [nth for nth, line in enumerate(log) if line == "store kernels wait for mark"]
        first_end = next(nth for nth, line in enumerate(log) if line.startswith("store finish"))
        assert waits[1] < first_end
        assert len(waits) == (2 if bad else 3)
        assert finished(log, "store") == marks(log, "store")


class BreaksOnce(list[str]):
    """A log at whose ``nth`` line the device fails."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth = nth

    def append(self, line: str) -> None:
        super().append(line)
        if len(self) == self.nth:
            raise OSError("the device failed")


@pytest.mark.parametrize("way", [DIRECT, STAGED], ids=["direct", "staged"])
def test_b01_where_a_start_fails_all_that_was_begun_is_waited_for(way: Way) -> None:
    """At whichever step: to the end of both queues."""
    made = made_codec("raw", LAYOUT)
    batch = shipments(made, [made_move(made, LAYOUT, BLOCKS)])
    whole = BreaksOnce(1000)
    made_mover(pool_for(), way, log=whole).move(Direction.STORE, [batch], "mark")
    last_work = max(nth for nth, line in enumerate(whole, 1) if line == "store kernels")
    first_work = whole.index("store kernels") + 1
    for nth in range(first_work, last_work + 1):
        log = BreaksOnce(nth)
        with pytest.raises(OSError, match="the device failed"):
            made_mover(pool_for(), way, log=log).move(Direction.STORE, [batch], "mark")
        assert finished(log[nth:], "store") == marks(log[nth:], "store")
        assert len(marks(log[nth:], "store")) == 2
