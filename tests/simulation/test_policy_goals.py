"""Gittins is never much worse than LRU, whatever the requests look like.

Every trace is generated here, always the same; KVTIER_SCALE makes them longer. Half a point of
prefix hits is allowed, and more where all that was learned becomes wrong again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kvtier.sim.shapes import model_shape
from kvtier.sim.study import Plan, run_study
from kvtier.sim.trace import Request, Trace, make_trace
from kvtier.types import Hint
from tests.conftest import SCALE

ALLOWED_POINTS = 0.5
ALLOWED_POINTS_WHEN_HABITS_SHIFT = 2.5
CAPACITIES = ("1%", "5%", "20%", "60%")
SEED = 3
REQUESTS = 1500 * SCALE

Requests = Iterator[Request]


def request(time_s: float, names: list[str], hint: Hint = Hint.NONE, turn: int = 1) -> Request:
    return Request(time_s, names, len(names) * 512, turn, hint)


def path(name: object, length: int) -> list[str]:
    return [f"{name}/{depth}" for depth in range(length)]


def all_unique(draw: random.Random) -> Requests:
    for number in range(REQUESTS):
        yield request(number + draw.random(), path(number, draw.randrange(1, 12)))


def one_loop(draw: random.Random) -> Requests:
    del draw
    for number in range(REQUESTS):
        yield request(float(number), path(number % 120, 8))


def zipf(draw: random.Random) -> Requests:
    ranks = range(1, 2001)
    weights = [1.0 / rank for rank in ranks]
    for number, name in enumerate(draw.choices(ranks, weights, k=REQUESTS)):
        yield request(number + draw.random(), path(name, 6))


def two_tenants(draw: random.Random) -> Requests:
    """One comes back every half minute, the other never; each has its own system prompt."""
    for number in range(REQUESTS):
        if number % 2:
            yield request(float(number), [*path("a", 3), *path(("a", number // 2 % 15), 6)])
        else:
            yield request(
                float(number), [*path("b", 3), *path(("b", number), draw.randrange(1, 9))]
            )


def shift_of_habit(draw: random.Random) -> Requests:
    """What was hot is dead from one moment on, again and again."""
    for number in range(REQUESTS):
        era = number * 6 // REQUESTS
        yield request(float(number), path((era, draw.randrange(40)), 6))


def one_giant_session(draw: random.Random) -> Requests:
    now = 0.0
    for number in range(REQUESTS // 8):
        now += 10 * draw.random()
        yield request(now, path("giant", number + 1), Hint.WILL_CONTINUE, number + 1)


def sessions(draw: random.Random, right: float = 0.8) -> Requests:
    """Turns of sessions that grow, share a system prompt and end; hints right at that rate."""
    for name in range(REQUESTS // 3):
        now, turns = draw.random() * REQUESTS, 1 + int(draw.expovariate(0.5))
        for turn in range(turns):
            truth = turn + 1 < turns
            says = truth if draw.random() < right else not truth
            names = path("system", 2) + path(name, 4 + 3 * turn)
            yield request(now, names, Hint.WILL_CONTINUE if says else Hint.DONE, turn + 1)
            now += 5.0 + draw.expovariate(1 / 60)


def reversed_hints(draw: random.Random) -> Requests:
    yield from sessions(draw, right=0.1)


def one_instant(draw: random.Random) -> Requests:
    """All timestamps are equal: time says nothing."""
    for each in sessions(draw):
        yield request(7.0, list(map(str, each.blocks)), each.hint or Hint.NONE, each.turn or 1)


TRACES: list[Callable[[random.Random], Requests]] = [
    all_unique,
    one_loop,
    zipf,
    two_tenants,
    shift_of_habit,
    one_giant_session,
    sessions,
    reversed_hints,
    one_instant,
]


def hits(trace: Trace) -> dict[tuple[str, str], float]:
    """Return prefix hits in percent by policy and capacity."""
    plan = Plan(("lru", "gittins"), CAPACITIES, ("raw",), model_shape("llama-3.1-8b"), workers=1)
    return {(row.policy, row.capacity): row.prefix_hit_percent for row in run_study(trace, plan)}


@pytest.mark.parametrize("requests", TRACES)
def test_gittins_is_never_much_worse_than_lru(
    requests: Callable[[random.Random], Requests],
) -> None:
    found = hits(make_trace(requests(random.Random(SEED)), 512))
    allowed = ALLOWED_POINTS_WHEN_HABITS_SHIFT if requests is shift_of_habit else ALLOWED_POINTS
    worse = {
        capacity: (found["lru", capacity], found["gittins", capacity])
        for capacity in CAPACITIES
        if found["gittins", capacity] < found["lru", capacity] - allowed
    }
    assert not worse, f"LRU and Gittins: {worse}"
