"""Plans that an engine's thread carries out a little at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.cache.turns import Steps, Turns
from kvtier.constants import COPY_TURN_S, PLANS_IN_TURN_MAX
from kvtier.testing.clock import FakeClock
from kvtier.types import MissReason, Result


class Device:
    """What plans give it, in order, and which of them it has ended."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.log: list[str] = []
        self.ended: set[int] = set()

    def plan(self, number: int, slices: int, *, slice_s: float = 0.0) -> Steps:
        """Ask for some slices, then wait until the device has ended."""
        for nth in range(slices):
            self.log.append(f"{number}.{nth}")
            self.clock.advance(slice_s)
            yield None
        ended: Callable[[], bool] = lambda: number in self.ended  # noqa: E731
        yield ended
        self.log.append(f"{number} ends")
        return Result(number, 0, ok=True)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device(clock: FakeClock) -> Device:
    return Device(clock)


def add(turns: Turns, steps: Steps, number: int) -> None:
    turns.add(steps, Result(number, 0, ok=False, reason=MissReason.WORKER))


def numbers(results: list[Result]) -> list[int]:
    return [result.plan_id for result in results]


def test_the_next_plan_is_asked_for_while_the_device_has_the_last(
    clock: FakeClock, device: Device
) -> None:
    turns = Turns(clock)
    for number in (1, 2):
        add(turns, device.plan(number, 2), number)
    assert turns.turn() == []
    assert device.log == ["1.0", "1.1", "2.0", "2.1"]
    device.ended = {2}
    assert numbers(turns.turn()) == [2]
    device.ended = {1}
    assert numbers(turns.turn()) == [1]
    assert turns.turn() == []


def test_a_turn_takes_a_bounded_time_and_nobody_comes_between_a_plans_slices(
    clock: FakeClock, device: Device
) -> None:
    turns = Turns(clock)
    add(turns, device.plan(1, 5, slice_s=0.6 * COPY_TURN_S), 1)
    add(turns, device.plan(2, 1), 2)
    device.ended = {1, 2}
    before = clock.now()
    assert turns.turn() == []
    assert clock.now() - before == pytest.approx(1.2 * COPY_TURN_S)
    assert device.log == ["1.0", "1.1"]
    assert turns.turn() == []
    assert numbers(turns.turn()) == [1, 2]
    assert device.log[3:6] == ["1.3", "1.4", "1 ends"]


def test_only_so_many_plans_are_begun(clock: FakeClock, device: Device) -> None:
    turns = Turns(clock)
    for number in range(PLANS_IN_TURN_MAX + 2):
        add(turns, device.plan(number, 1), number)
    turns.turn()
    assert len(device.log) == PLANS_IN_TURN_MAX
    device.ended = {3}
    assert numbers(turns.turn()) == [3]
    assert device.log[-1] == f"{PLANS_IN_TURN_MAX}.0"


def test_finishing_waits_for_all(clock: FakeClock, device: Device) -> None:
    """A plan that is asked to go on before its wait is over waits itself."""
    turns = Turns(clock)
    for number in (1, 2, 3):
        add(turns, device.plan(number, 2), number)
    turns.turn()
    assert sorted(numbers(turns.finish())) == [1, 2, 3]
    assert turns.finish() == []


def test_an_interrupt_of_the_engines_thread_loses_no_result(
    clock: FakeClock, device: Device
) -> None:
    """It is the engine's, and goes through; a plan without a result would never end."""

    def interrupted() -> Steps:
        yield None
        raise KeyboardInterrupt

    turns = Turns(clock)
    device.ended = {1, 3}
    add(turns, device.plan(1, 1), 1)
    add(turns, interrupted(), 2)
    add(turns, device.plan(3, 1), 3)
    with pytest.raises(KeyboardInterrupt):
        turns.turn()
    assert [(each.plan_id, each.ok) for each in turns.turn()] == [(1, True), (2, False), (3, True)]
    assert turns.finish() == []
