"""MIN by segments against Belady's rule, block by block; and replay against a plain list."""

from __future__ import annotations

import random

import pytest

from kvtier.admission.everything import Everything
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.lru import LRU
from kvtier.sim.optimum import future_of, optimal_hits
from kvtier.sim.replay import PolicyFactory, chunk_keys, replay
from kvtier.sim.trace import Request, Trace, make_trace
from kvtier.types import ChunkKey, Entry, Features


def random_trace(seed: int, requests: int = 120) -> Trace:
    """Sessions that grow, fork from each other and share prefixes."""
    draw = random.Random(seed)
    paths: list[list[int]] = [[0]]
    number = 1
    made: list[Request] = []
    for turn in range(requests):
        base = draw.choice(paths)
        path = base[: draw.randrange(len(base) + 1)] if draw.random() < 0.3 else list(base)
        for _ in range(draw.randrange(1, 5)):
            path.append(number)
            number += 1
        paths.append(path)
        made.append(Request(float(turn), path, 16 * len(path)))
    return make_trace(made, 16)


def belady(trace: Trace, capacity: int) -> list[int]:
    """Keep what is used soonest, the shallowest first; one block at a time, everything searched."""
    paths = [list(path) for path in trace.paths()]
    held: dict[int, tuple[int, int]] = {}
    hits: list[int] = []
    for request, path in enumerate(paths):
        hit = 0
        while hit < len(path) and path[hit] in held:
            hit += 1
        hits.append(hit)
        for depth in range(len(path) - 1, -1, -1):
            block = path[depth]
            held.pop(block, None)
            later = [i for i in range(request + 1, len(paths)) if block in paths[i]]
            if later:
                held[block] = later[0], depth
            if len(held) > capacity:
                del held[max(held, key=held.__getitem__)]
    return hits


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 3, 10, 40])
def test_min_is_belady_with_bypass(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    hits, kept = optimal_hits(trace, future_of(trace), capacity)
    assert list(hits) == belady(trace, capacity)
    assert min(kept) >= 0


def test_min_of_everything_is_all_that_comes_back() -> None:
    trace = random_trace(1)
    hits, kept = optimal_hits(trace, future_of(trace), trace.unique_count)
    assert sum(hits) == len(trace.blocks) - trace.unique_count
    assert sum(kept) == len(
        {block for block in trace.blocks if list(trace.blocks).count(block) > 1}
    )


@pytest.mark.parametrize("capacity", [5, 17, 60])
def test_replay_of_lru_is_a_plain_list(capacity: int) -> None:
    """From the last block to the first, LRU needs no tree to be leaf-first."""
    trace = random_trace(4, requests=300)
    outcome = replay(trace, trace.hints, LRU, capacity, chunk_keys(trace.unique_count))
    recent: list[int] = []
    for request, path in enumerate(trace.paths()):
        before = set(recent)
        hit = 0
        while hit < len(path) and path[hit] in before:
            hit += 1
        assert outcome.hits[request] == hit
        for block in reversed(path):
            if block in recent:
                recent.remove(block)
            recent.append(block)
            del recent[:-capacity]
        assert outcome.kept[request] == max(0, len(set(path) & set(recent)) - hit)


@pytest.mark.parametrize("policy", [LRU, ARC, Gittins])
@pytest.mark.parametrize("seed", range(4))
def test_no_policy_beats_the_optimum(policy: PolicyFactory, seed: int) -> None:
    trace = random_trace(seed, requests=200)
    future, keys = future_of(trace), chunk_keys(trace.unique_count)
    for capacity in (3, 20, 90):
        best, _ = optimal_hits(trace, future, capacity)
        assert sum(replay(trace, trace.hints, policy, capacity, keys).hits) <= sum(best)


class Clerk(Everything):
    """Writes down what it is asked and told, and refuses some positions."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__(1)
        self.refused = refused
        self.offered: list[tuple[ChunkKey, int]] = []
        self.touched: list[ChunkKey] = []
        self.gone: list[ChunkKey] = []

    def offer(self, entry: Entry, now: float) -> bool:
        self.offered.append((entry.key, entry.features.turn))
        return entry.position not in self.refused

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        self.touched.append(key)

    def left(self, key: ChunkKey, now: float) -> None:
        self.gone.append(key)


def replayed(clerk: Clerk, *paths: list[int], capacity: int = 3) -> tuple[list[int], list[int]]:
    trace = make_trace([Request(float(i), path, 16) for i, path in enumerate(paths)], 16)
    keys = chunk_keys(trace.unique_count)
    outcome = replay(trace, trace.hints, LRU, capacity, keys, admission=clerk)
    return list(outcome.hits), list(outcome.kept)


def test_an_admission_is_offered_what_is_missing_and_told_what_happens() -> None:
    clerk = Clerk(set())
    a, b, c, d = chunk_keys(4)
    assert replayed(clerk, [1, 2], [1, 2, 3], [9]) == ([0, 2, 0], [2, 1, 1])
    assert clerk.offered == [(a, 1), (b, 1), (c, 2), (d, 1)]
    assert clerk.touched == [b, a]
    assert clerk.gone == [c]


def test_what_is_refused_is_not_held_and_nothing_below_it() -> None:
    assert replayed(Clerk({1}), [1, 2, 3], [1, 2, 3], capacity=9) == ([0, 1], [1, 0])
    assert replayed(Clerk({0}), [1, 2, 3], [1, 2, 3], capacity=9) == ([0, 0], [0, 0])
