"""LRU's own order, beyond what every policy promises."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from kvtier.policies.lru import LRU
from kvtier.testing.policy_contract import entry_of, keys_of
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ChunkKey, Features

FEATURES = Features()


def make(capacity_bytes: int, *names: object, pins: set[ChunkKey] | None = None) -> LRU:
    policy = LRU(capacity_bytes, (pins if pins is not None else set()).__contains__)
    for name in names:
        assert policy.admit(entry_of(name), 0.0) == []
    return policy


def touch(policy: LRU, *names: object) -> None:
    for name in names:
        policy.touch(chunk_key(name), 0.0, FEATURES)


def test_the_longest_unused_goes_first() -> None:
    policy = make(4, "a", "b", "c", "d")
    touch(policy, "b", "a", "d")
    assert policy.admit(entry_of("e", nbytes=3), 0.0) == keys_of("c", "b", "a")
    assert policy.used_bytes == 4
    policy.check_integrity()


def test_a_sequence_touched_from_its_end_ages_from_its_end() -> None:
    policy = make(6)
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("x", None), ("y", "x")):
        policy.admit(entry_of(name, parent), 0.0)
    touch(policy, "y", "x", "c", "b", "a")
    assert policy.admit(entry_of("new", nbytes=6), 0.0) == keys_of("y", "x", "c", "b", "a")


def test_a_parent_keeps_its_own_age_when_its_child_has_left() -> None:
    policy = make(4, "old")
    policy.admit(entry_of("parent"), 0.0)
    policy.admit(entry_of("child", "parent"), 0.0)
    policy.admit(entry_of("young"), 0.0)
    touch(policy, "old")
    assert policy.admit(entry_of("e", nbytes=2), 0.0) == keys_of("child", "parent")


def test_a_refusal_leaves_the_order_as_it_was() -> None:
    pins = set(keys_of("b"))
    policy = make(4, "a", "b", "c", "d", pins=pins)
    touch(policy, "a")
    assert policy.admit(entry_of("e", nbytes=4), 0.0) is None
    assert policy.used_bytes == 4
    policy.check_integrity()
    pins.clear()
    assert policy.admit(entry_of("f", nbytes=4), 0.0) == keys_of("b", "c", "d", "a")


def test_what_lost_its_parent_later_goes_earlier_and_the_deepest_first() -> None:
    policy = LRU(7, lambda _: False)
    for name, parent in (("p", None), ("q", "p"), ("r", "q"), ("s", None), ("t", "s"), ("x", None)):
        policy.admit(entry_of(name, parent), 0.0)
    policy.remove(chunk_key("p"))
    policy.remove(chunk_key("s"))
    policy.check_integrity()
    assert policy.admit(entry_of("new", nbytes=7), 0.0) == keys_of("t", "r", "q", "x")


def test_a_touched_orphan_is_as_fresh_as_its_touch() -> None:
    policy = make(4, "x")
    policy.admit(entry_of("a"), 0.0)
    policy.admit(entry_of("b", "a"), 0.0)
    policy.remove(chunk_key("a"))
    touch(policy, "b")
    assert policy.admit(entry_of("c", nbytes=3), 0.0) == keys_of("x")


def test_many_pins_and_touches_leave_sound_books(rng: random.Random) -> None:
    pins: set[ChunkKey] = set()
    policy = LRU(200, pins.__contains__)
    held: set[ChunkKey] = set()
    for turn in range(3000):
        entry = entry_of((turn,), (turn - rng.choice((1, 7)),), nbytes=rng.randrange(1, 8))
        victims = policy.admit(entry, float(turn))
        if victims is not None:
            assert not pins & set(victims)
            held = (held - set(victims)) | {entry.key}
        known = sorted(held)
        touch(policy, (rng.randrange(turn + 1),))
        pins.add(rng.choice(known))
        if len(pins) > 40:
            pins.clear()
        if turn % 10 == 0:
            gone = rng.choice(known)
            policy.remove(gone)
            held.discard(gone)
        if turn % 50 == 0:
            policy.check_integrity()
    assert policy.used_bytes <= 200


SCRIPT = """
import hashlib
from kvtier.policies.lru import LRU
from kvtier.types import ChunkKey, Entry
keys = [ChunkKey(hashlib.sha256(bytes([n])).digest()) for n in range(60)]
policy = LRU(60, lambda _: False)
for n, key in enumerate(keys):
    policy.admit(Entry(key, keys[n // 8] if n else None, 1, n), 0.0)
for n in (0, 3, 5):
    policy.remove(keys[n])
victims = policy.admit(Entry(ChunkKey(b"new"), None, 60, 0), 0.0)
print(hashlib.sha256(b"".join(victims)).hexdigest())
"""


def test_b25_the_order_is_the_same_in_every_process() -> None:
    orders = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "123")
    }
    assert len(orders) == 1
