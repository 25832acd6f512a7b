"""Gittins: what it learns, what it forgets, and that time may do as it likes."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator

import pytest

from kvtier.policies.blocks import Blocks
from kvtier.policies.gittins import GHOSTS_MIN, Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.policies.groups import Groups
from kvtier.policies.lru import LRU
from kvtier.policies.reuse import BUCKETS, EDGES_S, ReuseTimes, bucket_of
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ChunkKey, Entry, Features, Hint

PLAIN = Features()


class Cache:
    """A policy, and what it holds; counts hits."""

    def __init__(self, policy: Gittins | LRU) -> None:
        self.policy = policy
        self.held: set[ChunkKey] = set()
        self.hit_count = 0

    def access(self, name: object, now: float, features: Features = PLAIN) -> bool:
        key = chunk_key(name)
        hit = key in self.held
        if not hit:
            victims = self.policy.admit(Entry(key, None, 1, 0), now)
            assert victims is not None
            self.held.difference_update(victims)
            self.held.add(key)
        self.policy.touch(key, now, features)
        self.hit_count += hit
        return hit


def loop_and_scan(turns: int) -> Iterator[tuple[object, float]]:
    """Ten names that come back every 40 accesses, among names that never do."""
    for turn in range(turns):
        yield ("loop", turn // 4 % 10) if turn % 4 == 0 else ("scan", turn), float(turn)


def test_learns_what_a_scan_is() -> None:
    """LRU of 20 loses the loop to the scan; a policy that learned it keeps the loop."""
    hits = {}
    for policy in (LRU(20, lambda _: False), Gittins(20, lambda _: False)):
        cache = Cache(policy)
        for name, now in loop_and_scan(20_000):
            cache.access(name, now)
        hits[type(policy)] = cache.hit_count
    assert hits[LRU] == 0
    assert hits[Gittins] > 0.8 * 5000


@pytest.mark.parametrize("comes_back", [Hint.WILL_CONTINUE, Hint.DONE])
def test_hints_mean_what_followed_them(comes_back: Hint) -> None:
    """What a hint says is learned, so callers who mean the opposite do no harm."""
    cache = Cache(Gittins(30, lambda _: False))
    hints = (Hint.WILL_CONTINUE, Hint.DONE)
    late_hits = 0
    for turn in range(20_000):
        hint = hints[turn % 2]
        late_hits += cache.access(turn, float(turn), Features(hint=hint)) and turn > 10_000
        earlier = turn - 41
        if hint is comes_back and earlier >= 0 and hints[earlier % 2] is not comes_back:
            earlier -= 1
        if hint is comes_back and earlier >= 0:
            hit = cache.access(earlier, turn + 0.5, Features(hint=Hint.NONE))
            late_hits += hit and turn > 10_000
    assert late_hits > 0.6 * 5000


def test_a_second_access_at_one_instant_is_none() -> None:
    """A scan whose blocks are admitted and touched, even thrice, stays a scan."""
    once, twice = (Gittins(10, lambda _: False) for _ in range(2))
    for policy, touches in ((once, 0), (twice, 3)):
        for turn in range(3000):
            entry = Entry(chunk_key(turn), None, 1, 0)
            assert policy.admit(entry, float(turn)) is not None
            for _ in range(touches):
                policy.touch(entry.key, float(turn), PLAIN)
        policy.check_integrity()
    entry = Entry(chunk_key("last"), None, 10, 0)
    assert once.admit(entry, 3000.0) == twice.admit(entry, 3000.0)


def test_a_first_turn_brings_its_hint_with_the_entry() -> None:
    """What is stored and never touched is told apart: the session that goes on keeps its place."""
    policy, held = Gittins(26, lambda _: False), set[ChunkKey]()
    draw, hits, returns = random.Random(4), 0, 0
    hints = [draw.choice((Hint.WILL_CONTINUE, Hint.DONE)) for _ in range(8000)]

    def admit(name: int, now: float, features: Features) -> None:
        nonlocal held
        victims = policy.admit(Entry(chunk_key(name), None, 1, 0, features), now)
        assert victims is not None
        held = (held - set(victims)) | {chunk_key(name)}

    for turn, hint in enumerate(hints):
        admit(turn, float(turn), Features(hint=hint))
        earlier = turn - 40
        if earlier < 0 or hints[earlier] is Hint.DONE:
            continue
        if turn > 4000:
            returns += 1
            hits += chunk_key(earlier) in held
        if chunk_key(earlier) in held:
            policy.touch(chunk_key(earlier), turn + 0.5, PLAIN)
        else:
            admit(earlier, turn + 0.5, PLAIN)
    assert hits > 0.9 * returns


def test_equal_times_are_told_apart() -> None:
    """A clock that stands still leaves the order of accesses: sessions one after the other hit."""
    hits = {}
    for policy in (LRU(10, lambda _: False), Gittins(10, lambda _: False)):
        cache = Cache(policy)
        for session in range(800):
            for turn in range(4):
                for depth in range(turn + 1):
                    cache.access((session, depth), 7.0 + (session * 4 + turn) * 1e-6)
        hits[type(policy)] = cache.hit_count
    assert hits[Gittins] >= hits[LRU] > 0


def test_a_prefix_that_branches_outlives_single_paths() -> None:
    """Sharing is part of a block's kind, at the branch and above it."""
    policy = Gittins(40, lambda _: False)
    now, held = 0.0, set[ChunkKey]()
    draw = random.Random(3)
    root_hits = 0
    for session in range(3000):
        now += draw.random() * 10
        path: list[object] = [("root", session % 4), ("shared", session % 4), (session, 0)]
        path += [(session, depth) for depth in range(1, 6)]
        root_hits += chunk_key(path[1]) in held and session > 1000
        for depth in range(len(path) - 1, -1, -1):
            key = chunk_key(path[depth])
            if key not in held:
                parent = chunk_key(path[depth - 1]) if depth else None
                victims = policy.admit(Entry(key, parent, 1, depth), now)
                assert victims is not None
                held = (held - set(victims)) | {key}
            policy.touch(key, now, PLAIN)
    policy.check_integrity()
    assert root_hits == 1999


@pytest.mark.parametrize(
    "times",
    [
        [0.0] * 9,
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0],
        [0.0, 1e300, 1.0, -1e300, 2.0, 1e9, 3.0, 4.0, 5.0],
        [0.0, math.inf, 1.0, math.nan, 2.0, -math.inf, 3.0, 4.0, 5.0],
    ],
)
def test_time_may_stand_still_jump_and_run_back(times: list[float]) -> None:
    policy = Gittins(8, lambda _: False)
    held: set[ChunkKey] = set()
    for turn in range(900):
        now = times[turn % len(times)]
        entry = Entry(chunk_key(turn), None, 1 + turn % 3, 0)
        victims = policy.admit(entry, now)
        assert victims is not None
        assert set(victims) <= held
        held = (held - set(victims)) | {entry.key}
        policy.touch(chunk_key(turn - turn % 2), now, PLAIN)
        policy.check_integrity()


def test_after_a_jump_time_counts_again() -> None:
    """One wrong clock reading does not stop the learning: the loop is found as ever."""
    cache = Cache(Gittins(20, lambda _: False))
    cache.access("early", 1e12)
    for name, now in loop_and_scan(20_000):
        cache.access(name, now)
    assert cache.hit_count > 0.8 * 5000


def test_ghosts_are_bounded() -> None:
    """``check_integrity`` counts them; ``GHOSTS_MIN`` is reached here."""
    policy = Gittins(1, lambda _: False)
    for turn in range(GHOSTS_MIN + 100):
        assert policy.admit(Entry(chunk_key(turn), None, 1, 0), float(turn)) is not None
    policy.check_integrity()


def test_a_ghost_remembers() -> None:
    """What left and comes back is known, so it counts as used twice."""
    cache = Cache(Gittins(5, lambda _: False))
    for turn in range(6000):
        if turn % 30 < 3:
            cache.access(("often", turn % 30), float(turn))
        else:
            cache.access(turn, float(turn))
    assert cache.hit_count > 300


def test_metadata_takes_64_bytes_a_block() -> None:
    """The columns of a block, and of a group even where every block is one of its own."""
    blocks = Blocks()
    columns = [*vars(blocks).values(), *vars(Groups(blocks, 1)).values()]
    assert sum(column.itemsize for column in columns if isinstance(column, array)) <= 64


def test_cost_keeps_what_is_deep() -> None:
    """Of two blocks as likely to come back, the one that costs less leaves."""
    for positions in ((0, 500), (500, 0)):
        policy = GittinsCost(2, lambda _: False)
        for position in positions:
            entry = Entry(chunk_key(position), None, 1, position)
            assert policy.admit(entry, 0.0) == []
        assert policy.admit(Entry(chunk_key("new"), None, 1, 0), 9.0) == [chunk_key(0)]


def test_bytes_are_weighed() -> None:
    """Of two blocks as likely to come back, the one that takes more room leaves."""
    policy = Gittins(9, lambda _: False)
    for nbytes in (1, 8):
        assert policy.admit(Entry(chunk_key(nbytes), None, nbytes, 0), 0.0) == []
    assert policy.admit(Entry(chunk_key("new"), None, 1, 0), 9.0) == [chunk_key(8)]


def test_buckets_hold_their_edges() -> None:
    assert bucket_of(0.0) == 0
    for bucket in range(BUCKETS):
        middle = (EDGES_S[bucket] + EDGES_S[bucket + 1]) / 2
        assert bucket_of(middle) == bucket
    assert bucket_of(1e300) == BUCKETS - 1


def test_the_index_is_the_best_rate_of_any_stopping_time() -> None:
    """Against the definition, computed the long way from the survival that the counts give."""
    draw = random.Random(2)
    times = ReuseTimes([0])
    for _ in range(2000):
        times.started[0] += 1
        wait_s = draw.lognormvariate(3.0, 1.5)
        if draw.random() < 0.6:
            times.reused[bucket_of(wait_s)] += 1
        elif draw.random() < 0.5:
            times.censored[bucket_of(wait_s)] += 1
    at_risk, survival = times.started[0], [1.0]
    for bucket in range(BUCKETS):
        hazard = times.reused[bucket] / at_risk if at_risk > 0 else 0.0
        survival.append(survival[-1] * (1 - hazard))
        at_risk -= times.reused[bucket] + times.censored[bucket]
    times.learn(0, EDGES_S[-1])
    for age in range(bucket_of(500.0)):
        best, wait = 0.0, 0.0
        for stop in range(age, BUCKETS):
            width = EDGES_S[stop + 1] - EDGES_S[stop]
            wait += (survival[stop] + survival[stop + 1]) / 2 * width
            best = max(best, (survival[age] - survival[stop + 1]) / wait)
        # The kind borrows a few observations, here of itself and of a faint prior.
        assert times.index[age] == pytest.approx(best, rel=0.05)
