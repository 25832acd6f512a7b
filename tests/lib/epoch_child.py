"""The process that is killed while it invalidates: an engine whose weights change under load.

``python -m tests.lib.epoch_child FOLDER SEED SETTLED TENANT`` runs four threads that store and load
at random for ever. What a thread stores is filled with the number of the weights; the main thread
changes the weights, invalidates the namespace, or the tenant's all, and then says ``done NUMBER``.
From then on no load may give anything of weights before that; ``wrong`` says that one did. From
the start on nothing may come of weights before ``SETTLED``.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.config import CacheConfig, DiskConfig
from kvtier.testing.engine_double import wait_until
from kvtier.types import Blocks, GroupKind, KVGroup, KVLayout, Move, Namespace, Plan, Result

CHUNK_TOKENS = 8
CHUNKS = 4
PROMPTS = 6
THREADS = 4
#: Stores and loads between two changes of the weights.
OPERATIONS_MAX = 100
SALT = "a tenant"
LAYOUT = KVLayout(
    (KVGroup(GroupKind.FULL, (0,), kv_heads=1, k_dim=64, v_dim=64, dtype="float32"),),
    chunk_tokens=CHUNK_TOKENS,
)
NAMESPACE = Namespace("weights", LAYOUT, tenant_salt=SALT)


def open_cache(folder: Path) -> Cache:
    """Open a cache that has room for some of the prompts in DRAM and for all on disk."""
    disk = DiskConfig(str(folder / "disk"), 1 << 22)
    return Cache(CacheConfig(dram_bytes=8 << 13, disk=disk, slab_bytes=4096))


class Weights:
    """The weights that are in use, and the latest before which nothing may come any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.settled = number
        self.operations = 0
        self.wrong: list[str] = []


class NumberEngine:
    """Stores the number of the weights and reads it back, through one cache; one thread."""

    def __init__(self, cache: Cache, weights: Weights) -> None:
        self._cache = cache
        self._weights = weights

    def match(self, prompt: int) -> Ready:
        """Look up a prompt as of now."""
        sequence = self._cache.sequence(NAMESPACE)
        sequence.append(list(range(prompt * 1000, prompt * 1000 + CHUNKS * CHUNK_TOKENS)))
        wait_until(lambda: isinstance(self._cache.match(sequence), Ready), "no disk opens")
        match = self._cache.match(sequence)
        assert isinstance(match, Ready)
        return match

    def store(self, prompt: int) -> None:
        """Store a prompt; its KV is that of the weights after its sequence has begun."""
        sequence = self.match(prompt).sequence
        number = self._weights.number.to_bytes(8, "little")
        plan = self._cache.begin_store(sequence, range(CHUNKS), _blocks())
        if plan is None:
            return
        for move in plan.moves:
            payload = self._payload(move)
            payload[:] = number * (len(payload) // 8)
        self._cache.finish([Result(plan.plan_id, 0, ok=True)])

    def load(self, match: Ready) -> int:
        """Load what a match found and look whose KV it is; return the tokens that came."""
        settled = self._weights.settled
        load = self._cache.begin_load(match, _blocks())
        if load is None:
            return 0
        seen: list[int] = []

        def over() -> bool:
            nonlocal settled
            for plan in load.poll():
                seen.extend(self._numbers(plan))
                # What has been answered before the weights changed was served before.
                settled = self._weights.settled
                self._cache.finish([Result(plan.plan_id, 0, ok=True)])
            return load.outcome is not None

        wait_until(over, "a load does not end")
        assert load.outcome is not None
        if load.outcome.end_token and min(seen) < settled:
            self._weights.wrong.append(f"{min(seen)} of {settled}")
        return load.outcome.end_token

    def _numbers(self, plan: Plan) -> set[int]:
        return {
            int.from_bytes(payload[start : start + 8], "little")
            for move in plan.moves
            for payload in (self._payload(move),)
            for start in range(0, len(payload), 8)
        }

    def _payload(self, move: Move) -> memoryview:
        start = move.slot.offset + move.payload_offset
        return self._cache.arena[start : start + 2 * CHUNK_TOKENS * 64 * 4]


def _blocks() -> Blocks:
    return Blocks(0, (tuple(range(CHUNKS)),), CHUNK_TOKENS)


def _work(engine: NumberEngine, weights: Weights, seed: int) -> None:
    draws = random.Random(seed)
    matches = [engine.match(prompt) for prompt in range(PROMPTS)]
    while True:
        prompt = draws.randrange(PROMPTS)
        if draws.random() < 0.5:
            engine.store(prompt)
        else:
            # Now and then what was found a while ago.
            engine.load(matches[prompt])
            matches[prompt] = engine.match(prompt)
        weights.operations += 1


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    """Run until killed."""
    folder, seed, settled, tenant = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    draws = random.Random(seed)
    weights = Weights(settled)
    weights.number += 10  # Above all that a child before this one may have begun.
    cache = open_cache(folder)
    for number in range(THREADS):
        work = (NumberEngine(cache, weights), weights, seed * THREADS + number)
        threading.Thread(target=_work, args=work, daemon=True).start()
    while True:
        until = weights.operations + draws.randint(1, OPERATIONS_MAX)
        wait_until(lambda until=until: weights.operations >= until, "nothing goes on")  # type: ignore[misc]
        weights.number += 1
        if tenant:
            cache.tenants.delete(SALT)
        else:
            cache.invalidate(NAMESPACE)
        weights.settled = weights.number
        _tell(f"wrong {weights.wrong[0]}" if weights.wrong else f"done {weights.settled}")


if __name__ == "__main__":
    main()
