"""What a decision costs: touches and admissions that evict, for every policy at several sizes.

    python bench/micro/policies.py [--blocks 100000] [--rounds 5]

The work is that of a full cache: sessions of 50 blocks, half of which extend an earlier one. Times
are of the CPU, so a busy machine spoils them less. The loop's own cost is measured and taken off.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.interfaces import EvictionPolicy
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.policies.lru import LRU
from kvtier.sim.replay import PolicyFactory, chunk_keys
from kvtier.types import ChunkKey, Entry, Features, Hint

POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "arc": ARC,
    "gittins": Gittins,
    "gittins-cost": GittinsCost,
}
SESSION_BLOCKS = 50


class Load:
    """A policy that is filled, and the same stream of sessions for each."""

    def __init__(self, policy: EvictionPolicy, keys: list[ChunkKey], blocks: int) -> None:
        self.policy = policy
        self._keys = keys
        self._next = 0
        self._now = 0.0
        self._draw = random.Random(1)
        self.held: set[ChunkKey] = set()
        self._sessions: list[list[ChunkKey]] = []
        while len(self.held) < blocks:
            self.admit(self.session())

    def session(self) -> list[Entry]:
        """A path of new blocks, every other time below an earlier path that is held."""
        path: list[ChunkKey] = []
        if self._sessions and self._draw.random() < 0.5:
            path = self._sessions[-self._draw.randrange(1, min(len(self._sessions), 200) + 1)]
            path = path if path[-1] in self.held else []
        new = self._keys[self._next : self._next + SESSION_BLOCKS]
        self._next += SESSION_BLOCKS
        self._sessions.append(path[-50:] + new)
        parents = [path[-1] if path else None, *new[:-1]]
        return [
            Entry(key, parent, 1, len(path) + depth)
            for depth, (key, parent) in enumerate(zip(new, parents, strict=True))
        ]

    def admit(self, entries: list[Entry]) -> float:
        """Admit a session's blocks at one instant. Return the seconds of CPU that took."""
        self._now += 0.1
        admit, now = self.policy.admit, self._now
        started = time.process_time()
        left = [admit(entry, now) for entry in entries]
        spent = time.process_time() - started
        for entry, victims in zip(entries, left, strict=True):
            assert victims is not None
            self.held.difference_update(victims)
            self.held.add(entry.key)
        return spent

    def touch(self) -> tuple[int, float]:
        """Touch an earlier session from its end. Return how many blocks, and the seconds."""
        self._now += 0.1
        at = self._draw.randrange(1, min(len(self._sessions), 500) + 1)
        path = [key for key in reversed(self._sessions[-at]) if key in self.held]
        features = Features(turn=self._draw.randrange(1, 9), hint=Hint.NONE)
        touch, now = self.policy.touch, self._now
        started = time.process_time()
        for key in path:
            touch(key, now, features)
        return len(path), time.process_time() - started


def loop_cost() -> float:
    """Seconds of CPU that calling a method per block takes, whatever it does."""

    class Nothing:
        def touch(self, key: ChunkKey, now: float, features: Features) -> None:
            del key, now, features

    touch, features, keys = Nothing().touch, Features(), [ChunkKey(b"")] * 200_000
    started = time.process_time()
    for key in keys:
        touch(key, 0.0, features)
    return (time.process_time() - started) / len(keys)


def measure(name: str, blocks: int, rounds: int, keys: list[ChunkKey]) -> None:
    load = Load(POLICIES[name](blocks, lambda _: False), keys, blocks)
    overhead_s = loop_cost()
    admit_us: list[float] = []
    touch_us: list[float] = []
    for _ in range(rounds):
        admit_s = touch_s = 0.0
        touches = admits = 0
        for _ in range(200):
            entries = load.session()
            admit_s += load.admit(entries)
            admits += len(entries)
            count, seconds = load.touch()
            touches += count
            touch_s += seconds
        admit_us.append((admit_s / admits - overhead_s) * 1e6)
        touch_us.append((touch_s / max(touches, 1) - overhead_s) * 1e6)
    figures = {"admit_and_evict_us": spread(admit_us), "touch_us": spread(touch_us)}
    write_row("policies", {"policy": name, "blocks": blocks, "rounds": rounds, **figures})
    print(
        f"{name:13} {blocks:>8} blocks: admit and evict {figures['admit_and_evict_us']['p50']:.2f}"
        f" us, touch {figures['touch_us']['p50']:.2f} us (p50 of {rounds})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for blocks in options.blocks:
        keys = chunk_keys(2 * blocks + (options.rounds + 2) * 200 * SESSION_BLOCKS)
        for name in POLICIES:
            measure(name, blocks, options.rounds, keys)


if __name__ == "__main__":
    main()
