"""Faults that users of paged engines with KV tiers reported, over the real cache with DRAM.

The toy engine runs in its thread beside the cache's worker. Every answer is compared with the
prompt computed alone, cache off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.cache.cache import Cache
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig
from kvtier.testing.engine_double import wait_until
from kvtier.types import Placement, Tier
from kvtier_engine.engine import Engine
from kvtier_engine.refusal import EngineLimits
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import FinishReason
from tests.lib.toy_engine import Client, ToyEngine, prompt_of
from tests.lib.toy_model import VOCAB, toy_pool

#: One shard of the toy: a page for its header and one for its only section.
CHUNK_BYTES = 2 * 4096


@dataclass
class Served:
    """A toy engine in its thread, over a real cache."""

    toy: ToyEngine
    engine: Engine
    cache: Cache

    def start(self, prompt: Sequence[int], max_tokens: int = 5) -> Client:
        client = Client(self.toy.request(prompt, max_tokens))
        self.engine.submit(client.request, client.take)
        return client

    def run(self, prompt: Sequence[int], max_tokens: int = 5) -> Client:
        """Serve one request; its stores have been answered when this returns."""
        client = self.start(prompt, max_tokens)
        client.wait()
        client.check()
        wait_until(lambda: self.engine.stats().blocks_used == 0, "blocks are still in use")
        return client


@contextmanager
def served(
    blocks: int, *, chunks: int = 256, chunk_tokens: int = 4, config: SchedulerConfig | None = None
) -> Iterator[Served]:
    """A toy engine over a cache of so many chunks of DRAM; afterwards nothing is left behind."""
    memory, clock = toy_pool(blocks), SystemClock()
    arena_bytes = chunks * CHUNK_BYTES
    cache = Cache(CacheConfig(dram_bytes=arena_bytes, slab_bytes=arena_bytes), clock=clock)
    worker = CacheWorker(Placement(), cache.arena)
    worker.register_pool(memory)
    toy = ToyEngine(
        blocks,
        memory=memory,
        cache=(cache, worker),
        chunk_tokens=chunk_tokens,
        config=config,
        clock=clock,
    )
    engine = Engine(toy.core, EngineLimits(4096, VOCAB), clock)
    engine.start()
    try:
        yield Served(toy, engine, cache)
    finally:
        engine.stop(0.0)
        worker.close()
        stats = cache.stats()
        cache.check_integrity()
        cache.close()
    assert engine.stats().error == ""
    toy.check_idle()
    assert (stats.loads_inflight, stats.stores_inflight) == (0, 0)
    assert stats.tiers[0].pinned_chunks == 0


class TestRealCache:
    def test_b02_alternating_prompts_through_dram(self) -> None:
        with served(8, chunks=16) as real:
            for turn in range(20):
                for seed in (1, 2):
                    answer = real.run(prompt_of(seed, 22), 3)
                    assert turn == 0 or answer.cached == 20
            hits = real.engine.stats().hit_tokens
        assert hits[Tier.DRAM] > 19 * 20

    def test_b01_stores_race_with_the_next_requests(self) -> None:
        with served(8) as real:
            clients = [real.start(prompt_of(turn, 12), 3) for turn in range(60)]
            for client in clients:
                client.wait()
                client.check()
            again = [real.run(prompt_of(turn, 12), 3) for turn in range(60)]
        assert sum(answer.cached for answer in again) > 0

    def test_b49_b127_all_of_a_long_prompt_is_stored_and_found(self) -> None:
        config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
        with served(32, config=config) as real:
            first = real.run(prompt_of(1, 64), 9)
            real.engine.forget_prefixes()
            answer = real.run([*prompt_of(1, 64), *first.tokens], 2)
            assert answer.usage.cached_by_tier == {Tier.DRAM: 72}

    def test_b06_a_chunk_of_which_the_pool_has_a_part(self) -> None:
        with served(16, chunk_tokens=8) as real:
            real.run(prompt_of(1, 16), 1)
            real.engine.forget_prefixes()
            real.run([*prompt_of(1, 16)[:4], 7], 1)
            answer = real.run([*prompt_of(1, 16), 1, 2, 3])
            assert answer.usage.cached_by_tier == {Tier.HBM: 4, Tier.DRAM: 12}

    def test_b15_whole_prompts(self) -> None:
        with served(16, chunk_tokens=8) as real:
            for length, cached in ((8, 4), (16, 12)):
                real.run(prompt_of(length, length), 1)
                for _ in range(2):
                    real.engine.forget_prefixes()
                    assert real.run(prompt_of(length, length), 1).cached == cached

    def test_b144_one_prompt_two_hundred_times(self) -> None:
        with served(4, chunks=8) as real:
            noise = 0
            for turn in range(200):
                answer = real.run(prompt_of(1, 9), 3)
                assert answer.cached == (8 if turn else 0)
                if turn % 10 == 0:
                    noise += real.run(prompt_of(2 + noise % 7, 13), 3).usage.completion_tokens

    def test_b161_a_lookup_is_counted_once(self) -> None:
        with served(16) as real:
            real.run(prompt_of(1, 9), 1)
            counters = real.cache.stats().tiers[0].counters
            assert sum(counters.miss_tokens.values()) == 8, "whole chunks of 9 tokens"
            real.engine.forget_prefixes()
            real.run(prompt_of(1, 9), 1)
            counters = real.cache.stats().tiers[0].counters
            assert sum(counters.miss_tokens.values()) == 8
            assert counters.hit_tokens == 8

    def test_invalidation_reaches_the_next_request(self) -> None:
        with served(16) as real:
            real.run(prompt_of(1, 9), 1)
            real.engine.forget_prefixes()
            real.cache.invalidate(real.toy.namespace)
            assert real.run(prompt_of(1, 9), 1).cached == 0

    def test_many_requests_over_little_of_everything(self, rng: random.Random) -> None:
        config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=12)
        with served(14, chunks=12, config=config) as real:
            clients = []
            for _ in range(60):
                trunk = prompt_of(rng.randrange(3), 20)
                prompt = [*trunk[: rng.choice([4, 8, 13, 20])], rng.randrange(80)]
                clients.append(real.start(prompt, rng.randint(1, 9)))
                if rng.random() < 0.2:
                    real.engine.abort(rng.choice(clients).request.request_id)
            for client in clients:
                client.wait()
                if client.finish_reason is not FinishReason.ABORT:
                    client.check()
