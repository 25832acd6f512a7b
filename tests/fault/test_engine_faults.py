"""Faults that users of paged engines with KV tiers reported, on the toy engine.

The toy's next token depends on every KV byte of its context, so one wrong block is seen in the
text. ``ToyEngine.run`` and ``Answer.check`` compare with the prompt computed alone, cache off.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest

from kvtier.cache.match import Ready
from kvtier.cache.worth.costs import Choice
from kvtier.types import Blocks, ChunkKey, Tier
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import FinishReason
from tests.lib.scripted_tiers import ScriptedLoad, ScriptedTiers
from tests.lib.toy_engine import Answer, ToyEngine, prompt_of
from tests.lib.toy_model import kv_of, toy_pool


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
        engine.lose_hbm()
        engine.tiers.failing_chunks = {1}
        answer = engine.run(prompt_of(1, 13))
        assert answer.usage.cached_by_tier == {Tier.DRAM: 4}
        assert engine.runner.steps[-5].rows[0].start == 4

    def test_b04_what_a_failed_load_left_behind_is_never_stored(self) -> None:
        engine = ToyEngine(tiers=True)
        answers = [engine.run(prompt_of(1, 13), 1)]
        engine.lose_hbm()
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
        engine.lose_hbm()
        engine.runner.steps.clear()
        engine.tiers.broken.add("execute")
        answer = engine.run(prompt_of(1, 9))
        assert answer.cached == 0
        (retry,) = engine.runner.steps[0].rows
        assert (retry.start, len(retry.token_ids)) == (0, 9)

    def test_b129_when_all_loads_fail_the_request_still_ends(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 12), 5)
        engine.lose_hbm()
        engine.tiers.failing_chunks = {0, 1, 2}
        answer = engine.run(prompt_of(1, 12), 5)
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.tokens) == 5

    def test_b63_a_chunk_that_goes_between_match_and_load(self) -> None:
        memory = toy_pool(16)
        tiers = Forgetful(memory)
        engine = ToyEngine(16, memory=memory, cache=(tiers, tiers))
        engine.run(prompt_of(1, 13), 1)
        engine.lose_hbm()
        tiers.forget_at_load = 1
        answer = engine.run(prompt_of(1, 13))
        assert answer.cached == 4

    def test_b15_b125_chunks_of_whole_prompts_and_more_in_the_pool_than_in_the_tiers(self) -> None:
        for length, cached in ((4, 0), (8, 4), (12, 8)):
            engine = ToyEngine(tiers=True)
            prompt = prompt_of(length, length)
            engine.run(prompt)
            for _ in range(2):
                engine.lose_hbm()
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
                engine.lose_hbm()
                engine.run(prompt[: 4 * kept + 1], 1)
                engine.tiers.failing_chunks = {failing}
                answer = engine.run(prompt)
                assert answer.cached == (16 if failing < kept else 4 * failing)


class Forgetful(ScriptedTiers):
    """Loses a chunk between a lookup and the load that follows it."""

    forget_at_load: int | None = None

    def begin_load(
        self, match: Ready, blocks: Blocks, *, choice: Choice | None = None
    ) -> ScriptedLoad | None:
        if self.forget_at_load is not None:
            del self.chunks[match.hits[self.forget_at_load].key]
        return super().begin_load(match, blocks, choice=choice)


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
        engine.lose_hbm()
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
            engine.lose_hbm()
            engine.tiers.load_polls = rng.randint(0, 4)
            answer = engine.submit(prompt_of(1, 17), 3)
            engine.step(rng.randint(0, 4))
            engine.core.abort(answer.request.request_id)
        engine.finish()
        assert engine.link.held() == {}
        engine.lose_hbm()
        assert engine.run(prompt_of(1, 33), 1).cached == 32

    def test_b90_what_is_loaded_for_nobody_is_given_to_nobody(self) -> None:
        """The blocks of an aborted load are not given away while it may still write to them."""
        engine = ToyEngine(6, tiers=True)
        engine.run(prompt_of(1, 17), 1)
        engine.lose_hbm()
        engine.tiers.load_polls = 6
        answer = engine.submit(prompt_of(1, 17), 3)
        engine.step()
        engine.core.abort(answer.request.request_id)
        other = engine.submit(prompt_of(2, 17), 3)
        engine.finish()
        other.check()
