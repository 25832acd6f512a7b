"""What a decision costs: touches and admissions that evict, for every policy at several sizes.

    python bench/micro/policies.py [--smoke] [--blocks 100000] [--rounds 5]

The work is that of a full cache: requests of 50 blocks, half of which extend an earlier one, and
one earlier request is touched again for each. A decision is one admission or one touch, in that
mix. Times are of the CPU, so a busy machine spoils them less; the clock is read once for thousands
of decisions. The loop's own cost is measured and taken off. ``dict`` is the physical limit: a dict
lookup per touch, an insertion and a removal per admission, with the same keys.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.interfaces import EvictionPolicy
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.policies.lru import LRU
from kvtier.sim.replay import PolicyFactory, chunk_keys
from kvtier.types import ChunkKey, Entry, Features

REQUEST_BLOCKS = 50
REQUESTS_A_ROUND = 400
FEATURES = [Features(turn=turn) for turn in range(1, 9)]


class Nothing:
    """Decides nothing: what the loop costs."""

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        del entry, now
        return []

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        del key, now, features

    def remove(self, key: ChunkKey) -> None:
        del key


class BareDict(Nothing):
    """A dict and a queue, first in, first out: no order of use, no leaves, no pins."""

    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        del pinned
        self._held: dict[ChunkKey, Entry] = {}
        self._queue: deque[ChunkKey] = deque()
        self._capacity_bytes = capacity_bytes

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        del now
        self._held[entry.key] = entry
        self._queue.append(entry.key)
        if len(self._held) <= self._capacity_bytes:
            return []
        victim = self._queue.popleft()
        del self._held[victim]
        return [victim]

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        del now, features
        self._held.get(key)


POLICIES: dict[str, PolicyFactory] = {
    "dict": BareDict,
    "lru": LRU,
    "arc": ARC,
    "gittins": Gittins,
    "gittins-cost": GittinsCost,
}


class Load:
    """A policy that is filled, and the same stream of requests for each."""

    def __init__(self, policy: EvictionPolicy, keys: list[ChunkKey], blocks: int) -> None:
        self.policy = policy
        self._keys = keys
        self._next = 0
        self._now = 0.0
        self._draw = random.Random(1)
        self._held: set[ChunkKey] = set()
        self._paths: list[list[ChunkKey]] = []
        while len(self._held) < blocks:
            self.admit([self.request()])

    def request(self) -> tuple[float, list[Entry]]:
        """New blocks, every other time below an earlier path that is held whole."""
        path: list[ChunkKey] = []
        if self._paths and self._draw.random() < 0.5:
            path = self._paths[-self._draw.randrange(1, min(len(self._paths), 200) + 1)]
            path = path if path[-1] in self._held else []
        new = self._keys[self._next : self._next + REQUEST_BLOCKS]
        self._next += REQUEST_BLOCKS
        self._paths.append(path[-REQUEST_BLOCKS:] + new)
        self._now += 0.1
        parents = [path[-1] if path else None, *new[:-1]]
        return self._now, [
            Entry(key, parent, 1, len(path) + depth)
            for depth, (key, parent) in enumerate(zip(new, parents, strict=True))
        ]

    def admit(self, requests: list[tuple[float, list[Entry]]]) -> float:
        """Admit blocks, parents first. Return the seconds of CPU that took."""
        seconds, left = timed_admit(self.policy, requests)
        entries = (entry for _, entries in requests for entry in entries)
        for entry, victims in zip(entries, left, strict=True):
            assert victims is not None
            self._held.difference_update(victims)
            self._held.add(entry.key)
        return seconds

    def paths(self, count: int) -> list[tuple[float, Features, list[ChunkKey]]]:
        """Earlier paths of which something is held, from their ends."""
        found = []
        for _ in range(count):
            self._now += 0.1
            at = self._draw.randrange(1, min(len(self._paths), 500) + 1)
            path = [key for key in reversed(self._paths[-at]) if key in self._held]
            found.append((self._now, FEATURES[self._draw.randrange(8)], path))
        return found


def timed_admit(
    policy: EvictionPolicy, requests: list[tuple[float, list[Entry]]]
) -> tuple[float, list[list[ChunkKey] | None]]:
    """Admit, and return the seconds of CPU and the answers."""
    admit = policy.admit
    left: list[list[ChunkKey] | None] = []
    started = time.process_time()
    for now, entries in requests:
        left += [admit(entry, now) for entry in entries]
    return time.process_time() - started, left


def timed_touch(
    policy: EvictionPolicy, paths: list[tuple[float, Features, list[ChunkKey]]]
) -> float:
    """Touch, and return the seconds of CPU."""
    touch = policy.touch
    started = time.process_time()
    for now, features, path in paths:
        for key in path:
            touch(key, now, features)
    return time.process_time() - started


def measure(name: str, blocks: int, rounds: int, requests: int, keys: list[ChunkKey]) -> None:
    """Print and keep what a decision of one policy costs."""
    load = Load(POLICIES[name](blocks, lambda _: False), keys, blocks)
    figures: dict[str, list[float]] = {"admit_and_evict": [], "touch": [], "decision": []}
    for _ in range(rounds):
        batch = [load.request() for _ in range(requests)]
        admit_s = load.admit(batch) - min(timed_admit(Nothing(), batch)[0] for _ in range(3))
        paths = load.paths(requests)
        touch_s = timed_touch(load.policy, paths)
        touch_s -= min(timed_touch(Nothing(), paths) for _ in range(3))
        admits, touches = requests * REQUEST_BLOCKS, sum(len(path) for *_, path in paths)
        figures["admit_and_evict"].append(admit_s / admits * 1e6)
        figures["touch"].append(touch_s / max(touches, 1) * 1e6)
        figures["decision"].append((admit_s + touch_s) / (admits + touches) * 1e6)
    spreads = {f"{figure}_us": spread(values) for figure, values in figures.items()}
    if requests == REQUESTS_A_ROUND:
        write_row("policies", {"policy": name, "blocks": blocks, "rounds": rounds, **spreads})
    told = ", ".join(
        f"{figure} {each['p20']:.2f} / {each['p50']:.2f} / {each['p80']:.2f}"
        for figure, each in spreads.items()
    )
    print(f"{name:13} {blocks:>8} blocks: {told} (p20 / p50 / p80 of {rounds})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no row: does it run?")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes, rounds, requests = options.blocks, options.rounds, REQUESTS_A_ROUND
    if options.smoke:
        sizes, rounds, requests = [200], 1, 5
    for blocks in sizes:
        keys = chunk_keys(2 * blocks + (rounds + 2) * requests * REQUEST_BLOCKS)
        for name in POLICIES:
            measure(name, blocks, rounds, requests, keys)


if __name__ == "__main__":
    main()
