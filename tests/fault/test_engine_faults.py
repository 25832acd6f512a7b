"""Faults that users of paged engines with KV tiers reported, on the toy engine.

The toy's next token depends on every KV byte of its context, so one wrong block is seen in the
text. ``ToyEngine.run`` and ``Answer.check`` compare with the prompt computed alone, cache off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig
from kvtier.testing.engine_double import wait_until
from kvtier.types import Blocks, ChunkKey, Placement, Tier
from kvtier_engine.engine import Engine
from kvtier_engine.refusal import EngineLimits
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import FinishReason
from tests.lib.scripted_tiers import ScriptedLoad, ScriptedTiers
from tests.lib.toy_engine import Answer, Client, ToyEngine, prompt_of
from tests.lib.toy_model import VOCAB, kv_of, toy_pool

#: One shard of the toy: a page for its header and one for its only section.
CHUNK_BYTES = 2 * 4096


def evict_pool(engine: ToyEngine) -> None:
    """Lose everything in HBM, as other traffic would do it in time."""
    engine.core.forget_prefixes()
    engine.memory.poison()


def right_chunks(engine: ToyEngine, tokens: Sequence[int]) -> dict[ChunkKey, bytes]:
    """What the tiers may hold under each key of a sequence, computed without any pool."""
    digest, rows = blake2b(digest_size=16), []
    for position, token in enumerate(tokens):
        rows.append(kv_of(digest.digest(), token, position))
        digest.update(rows[-1].tobytes())
    sequence = engine.tiers.sequence(engine.namespace)
    sequence.append(tokens)
    size = sequence.chunk_tokens
    return {
        key: np.stack(rows[i * size : (i + 1) * size]).tobytes()
        for i, key in enumerate(sequence.chunk_keys)
    }


def check_chunks(engine: ToyEngine, answers: Sequence[Answer]) -> int:
    """Compare what the tiers hold of these sequences; return how many chunks that is."""
    held = 0
    for answer in answers:
        for key, payload in right_chunks(engine, [*answer.request.prompt, *answer.tokens]).items():
            stored = engine.tiers.chunks.get(key)
            if stored is not None:
                assert stored.tobytes() == payload, "another request's bytes under this key"
                held += 1
    return held


class TestOrdering:
    def test_b01_a_late_store_copies_what_was_computed(self) -> None:
        """Each block is wanted by the next request as soon as its store is queued."""
        engine = ToyEngine(8, tiers=True, config=SchedulerConfig(max_num_seqs=2))
        answers = []
        for turn in range(200):
            engine.tiers.store_polls = 1 + turn % 4
            answers.append(engine.submit(prompt_of(turn % 80, 12), 3))
            engine.step()
        engine.finish()
        for answer in answers:
            answer.check()
        assert check_chunks(engine, answers) == 200 * 3

    def test_b123_blocks_of_a_preempted_request_wait_for_their_store(self) -> None:
        engine = ToyEngine(6, tiers=True, config=SchedulerConfig(max_num_seqs=2))
        engine.tiers.store_polls = 3
        answers = [engine.submit(prompt_of(seed, 8), 9) for seed in (1, 2)]
        engine.finish()
        assert engine.core.stats().preemptions > 0
        for answer in answers:
            answer.check()
        assert check_chunks(engine, answers) > 0

    def test_b122_a_preempted_request_comes_back_while_its_stores_run(self) -> None:
        engine = ToyEngine(6, tiers=True, config=SchedulerConfig(max_num_seqs=2))
        engine.tiers.store_polls = 3
        first = engine.submit(prompt_of(1, 8), 9)
        second = engine.submit(prompt_of(2, 8), 9)
        stores_met_admission = False
        while engine.core.busy:
            before = engine.core.stats().preemptions
            engine.step()
            if engine.core.stats().preemptions > before:
                stores_met_admission = bool(engine.link.held())
        assert stores_met_admission, "it was preempted with stores under way"
        for answer in (first, second):
            answer.check()
        engine.check_idle()

    def test_b02_prompts_that_evict_each_other(self) -> None:
        """HBM of 8 blocks, two prompts of 6: every round evicts one and loads the other."""
        engine = ToyEngine(8, tiers=True)
        for turn in range(20):
            engine.tiers.store_polls, engine.tiers.load_polls = turn % 3, turn % 2
            for seed in (1, 2):
                answer = engine.run(prompt_of(seed, 22), 3)
                assert answer.cached == (0 if turn == 0 else 20)


class TestFailedLoads:
    def test_b04_a_failed_read_ends_the_prefix(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 13), 1)
        evict_pool(engine)
        engine.tiers.failing_chunks = {1}
        answer = engine.run(prompt_of(1, 13))
        assert answer.usage.cached_by_tier == {Tier.DRAM: 4}
        assert engine.runner.steps[-5].rows[0].start == 4

    def test_b04_what_a_failed_load_left_behind_is_never_stored(self) -> None:
        engine = ToyEngine(tiers=True)
        answers = [engine.run(prompt_of(1, 13), 1)]
        evict_pool(engine)
        engine.tiers.failing_chunks = {0, 1, 2}
        lost = list(engine.tiers.chunks)[1:]
        answers.append(engine.submit(prompt_of(1, 13), 1))
        engine.step()
        for key in lost:
            del engine.tiers.chunks[key]
        engine.finish()
        assert check_chunks(engine, answers) == 6

    def test_b22_recompute_after_a_rejected_load(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 9), 1)
        evict_pool(engine)
        engine.runner.steps.clear()
        engine.tiers.broken.add("execute")
        answer = engine.run(prompt_of(1, 9))
        assert answer.cached == 0
        (retry,) = engine.runner.steps[0].rows
        assert (retry.start, len(retry.token_ids)) == (0, 9)

    def test_b129_when_all_loads_fail_the_request_still_ends(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 12), 5)
        evict_pool(engine)
        engine.tiers.failing_chunks = {0, 1, 2}
        answer = engine.run(prompt_of(1, 12), 5)
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.tokens) == 5

    def test_b63_a_chunk_that_goes_between_match_and_load(self) -> None:
        memory = toy_pool(16)
        tiers = Forgetful(memory)
        engine = ToyEngine(16, memory=memory, cache=(tiers, tiers))
        engine.run(prompt_of(1, 13), 1)
        evict_pool(engine)
        tiers.forget_at_load = 1
        answer = engine.run(prompt_of(1, 13))
        assert answer.cached == 4

    def test_b15_b125_chunks_of_whole_prompts_and_more_in_the_pool_than_in_the_tiers(self) -> None:
        for length, cached in ((4, 0), (8, 4), (12, 8)):
            engine = ToyEngine(tiers=True)
            prompt = prompt_of(length, length)
            engine.run(prompt)
            for _ in range(2):
                evict_pool(engine)
                assert engine.run(prompt).cached == cached
            engine.tiers.chunks.clear()
            assert engine.run(prompt).cached == cached, "the pool alone"

    def test_every_load_of_a_run_fails_once(self) -> None:
        """Let each chunk's load fail in turn, at every length of what is left in the pool."""
        prompt = prompt_of(1, 17)
        for failing in range(4):
            for kept in range(4):
                engine = ToyEngine(tiers=True)
                engine.run(prompt, 1)
                evict_pool(engine)
                engine.run(prompt[: 4 * kept + 1], 1)
                engine.tiers.failing_chunks = {failing}
                answer = engine.run(prompt)
                assert answer.cached == (16 if failing < kept else 4 * failing)


class Forgetful(ScriptedTiers):
    """Loses a chunk between a lookup and the load that follows it."""

    forget_at_load: int | None = None

    def begin_load(
        self, match: Ready, blocks: Blocks, *, deadline: float | None = None
    ) -> ScriptedLoad | None:
        if self.forget_at_load is not None:
            del self.chunks[match.hits[self.forget_at_load].key]
        return super().begin_load(match, blocks, deadline=deadline)


class TestAborts:
    def test_b24_an_abort_between_two_chunks_of_a_prefill(self) -> None:
        config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=10)
        engine = ToyEngine(8, config=config)
        answer = engine.submit(prompt_of(1, 16), 4)
        engine.step()
        engine.core.abort(answer.request.request_id)
        engine.check_idle()
        assert engine.pool.cached == 2, "the two blocks that were full"
        for turn in range(10):
            assert engine.run(prompt_of(1, 16), 4).cached == (8 if turn == 0 else 12)

    @pytest.mark.parametrize("state", ["running", "queued", "loading", "asking"])
    def test_b95_an_abort_frees_all_blocks_within_a_step(self, state: str) -> None:
        config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)
        engine = ToyEngine(32, tiers=True, config=config)
        engine.run(prompt_of(1, 9), 1)
        evict_pool(engine)
        engine.tiers.load_polls = 0 if state == "running" else 4
        engine.tiers.pending_lookups = 9 if state == "asking" else 0
        ahead = engine.submit(prompt_of(2, 9), 30) if state == "queued" else None
        answer = engine.submit(prompt_of(1, 9), 50)
        engine.step(3)
        engine.core.abort(answer.request.request_id)
        assert answer.finish_reason is FinishReason.ABORT
        if ahead is not None:
            engine.core.abort(ahead.request.request_id)
        held = sum(engine.link.held().values())
        assert held == (2 if state == "loading" else 0), "only what the load may still write to"
        assert engine.pool.available == engine.pool.block_count - held
        engine.finish()

    def test_b90_aborts_during_loads_lose_nothing(self, rng: random.Random) -> None:
        engine = ToyEngine(12, tiers=True)
        engine.run(prompt_of(1, 33), 1)
        for _ in range(20):
            evict_pool(engine)
            engine.tiers.load_polls = rng.randint(0, 4)
            answer = engine.submit(prompt_of(1, 17), 3)
            engine.step(rng.randint(0, 4))
            engine.core.abort(answer.request.request_id)
        engine.finish()
        assert engine.link.held() == {}
        evict_pool(engine)
        assert engine.run(prompt_of(1, 33), 1).cached == 32

    def test_b90_what_is_loaded_for_nobody_is_given_to_nobody(self) -> None:
        """The blocks of an aborted load are not given away while it may still write to them."""
        engine = ToyEngine(6, tiers=True)
        engine.run(prompt_of(1, 17), 1)
        evict_pool(engine)
        engine.tiers.load_polls = 6
        answer = engine.submit(prompt_of(1, 17), 3)
        engine.step()
        engine.core.abort(answer.request.request_id)
        other = engine.submit(prompt_of(2, 17), 3)
        engine.finish()
        other.check()


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
        config=replace(config or SchedulerConfig(), load_wait_s_min=20.0, load_wait_s_max=20.0),
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
    """The same kinds, over ``kvtier.cache`` with DRAM and its worker's thread."""

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
