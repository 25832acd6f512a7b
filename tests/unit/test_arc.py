"""ARC against the paper, step by step, and what leaves and pins change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.policies.arc import ARC
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ChunkKey, Entry, Features

FEATURES = Features()


class PaperARC:
    """Figure 4 of Megiddo and Modha (FAST 2003), word by word, for pages of one size."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        # Lists, the least recently used first.
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> list[int]:
        """Return the pages that left the cache."""
        left: list[int] = []
        if x in self.t1 or x in self.t2:  # Case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:  # Case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            left += self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # Case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            left += self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # Case IV
            l1, l2 = len(self.t1) + len(self.b1), len(self.t2) + len(self.b2)
            if l1 == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    left += self.replace(x)
                else:
                    left.append(self.t1.pop(0))
            elif l1 < self.c and l1 + l2 >= self.c:
                if l1 + l2 == 2 * self.c:
                    self.b2.pop(0)
                left += self.replace(x)
            self.t1.append(x)
        return left

    def replace(self, x: int) -> list[int]:
        at_p = x in self.b2 and len(self.t1) == self.p
        if self.t1 and (at_p or len(self.t1) > self.p):
            victim = self.t1.pop(0)
            self.b1.append(victim)
        else:
            victim = self.t2.pop(0)
            self.b2.append(victim)
        return [victim]


def scan_and_loop(draw: random.Random) -> int:
    """Pages of three habits: a hot few, a loop, and a scan that never comes back."""
    habit = draw.random()
    if habit < 0.4:
        return draw.randrange(8)
    return 100 + draw.randrange(30) if habit < 0.8 else 1000 + draw.randrange(10**6)


@pytest.mark.parametrize("c", [1, 2, 7, 24])
@pytest.mark.parametrize(
    "page", [lambda draw: draw.randrange(20), lambda draw: draw.randrange(60), scan_and_loop]
)
def test_equals_the_paper_step_by_step(c: int, page: Callable[[random.Random], int]) -> None:
    draw = random.Random(c)
    paper, policy = PaperARC(c), ARC(c, lambda _: False)
    held: set[int] = set()
    for step in range(4000):
        x = page(draw)
        expected = paper.request(x)
        if x in held:
            policy.touch(chunk_key(x), float(step), FEATURES)
            assert expected == []
        else:
            victims = policy.admit(Entry(chunk_key(x), None, 1, 0), float(step))
            assert victims == [chunk_key(each) for each in expected], f"step {step}, page {x}"
            held.add(x)
            held -= set(expected)
        assert held == {*paper.t1, *paper.t2}
    policy.check_integrity()


def test_a_touch_at_the_instant_of_admission_makes_nothing_frequent() -> None:
    """A request that admits a chunk and touches it has used it once: a scan drives it out."""
    policy = ARC(2, lambda _: False)
    for name in ("once", "twice"):
        assert policy.admit(Entry(chunk_key(name), None, 1, 0), 1.0) == []
        policy.touch(chunk_key(name), 1.0, FEATURES)
    policy.touch(chunk_key("twice"), 2.0, FEATURES)
    assert policy.admit(Entry(chunk_key("scan"), None, 1, 0), 3.0) == [chunk_key("once")]


def test_pins_in_one_list_send_it_to_the_other() -> None:
    pins: set[ChunkKey] = set()
    policy = ARC(2, pins.__contains__)
    for name in ("recent", "frequent"):
        assert policy.admit(Entry(chunk_key(name), None, 1, 0), 1.0) == []
    policy.touch(chunk_key("frequent"), 2.0, FEATURES)
    pins.add(chunk_key("recent"))
    assert policy.admit(Entry(chunk_key("new"), None, 1, 0), 3.0) == [chunk_key("frequent")]


def test_books_hold_for_entries_of_many_sizes() -> None:
    draw = random.Random(5)
    policy = ARC(1000, lambda _: False)
    held: set[int] = set()
    for step in range(3000):
        name = scan_and_loop(draw)
        if name in held:
            policy.touch(chunk_key(name), float(step), FEATURES)
            continue
        entry = Entry(chunk_key(name), None, 1 + name % 97, 0)
        victims = policy.admit(entry, float(step))
        assert victims is not None
        held = {each for each in held if chunk_key(each) not in victims} | {name}
        policy.check_integrity()
