"""What the link asks of the cache, when, and what it holds meanwhile. The tiers are scripted."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest

from kvtier.types import Tier
from kvtier_engine.link import NoLink
from kvtier_engine.scheduling import SchedulerConfig
from tests.lib.toy_engine import BLOCK, ToyEngine, prompt_of


class TestStores:
    def test_b49_everything_that_was_computed_can_be_found_again(self) -> None:
        engine = ToyEngine(tiers=True, config=SchedulerConfig(max_num_batched_tokens=16))
        engine.run(prompt_of(1, 32), 1)
        assert len(engine.tiers.chunks) == 8
        engine.lose_hbm()
        assert engine.run(prompt_of(1, 32)).cached == 28, "all but the block of the last token"

    def test_b127_every_step_of_a_long_prefill_is_stored(self) -> None:
        engine = ToyEngine(tiers=True, config=SchedulerConfig(max_num_batched_tokens=16))
        engine.tiers.store_polls = 2
        engine.run(prompt_of(1, 64), 1)
        assert len(engine.runner.steps) == 4
        assert len(engine.tiers.chunks) == 16

    def test_generated_tokens_are_stored_once_their_kv_is_there(self) -> None:
        engine = ToyEngine(tiers=True, chunk_tokens=8)
        first = engine.submit(prompt_of(1, 6), 11)
        engine.step(2)
        assert not engine.tiers.chunks, "7 tokens are computed"
        engine.step(2)
        assert len(engine.tiers.chunks) == 1, "8 tokens are computed"
        engine.finish()
        assert len(engine.tiers.chunks) == 2, "16 of 17 tokens: the last one's KV is not there"
        engine.lose_hbm()
        answer = engine.run([*prompt_of(1, 6), *first.tokens], 2)
        assert answer.usage.cached_by_tier == {Tier.DRAM: 16}

    def test_what_was_refused_is_offered_again(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.tiers.refuse_stores = True
        answer = engine.submit(prompt_of(1, 9), 8)
        engine.step(3)
        engine.tiers.refuse_stores = False
        engine.finish()
        answer.check()
        assert len(engine.tiers.chunks) == 4

    def test_what_a_plan_left_out_is_offered_again(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.tiers.store_chunks_max = 1
        engine.run(prompt_of(1, 9), 8)
        assert len(engine.tiers.chunks) == 4, "one by each offer, the last one at the end"

    @pytest.mark.parametrize(("crowded", "stored"), [(True, 3), (False, 1)])
    def test_what_waits_for_a_staging_area_is_offered_with_each_step(
        self, crowded: bool, stored: int
    ) -> None:
        """Nobody waits for it, nor until a chunk more has been computed."""
        engine = ToyEngine(tiers=True, chunk_tokens=8)
        engine.tiers.store_chunks_max, engine.tiers.crowded = 1, crowded
        engine.submit(prompt_of(1, 33), 5)
        engine.step(4)
        assert len(engine.tiers.chunks) == stored
        engine.finish()

    def test_blocks_are_held_until_the_store_is_answered(self) -> None:
        engine = ToyEngine(8, tiers=True)
        engine.tiers.store_polls = 3
        engine.submit(prompt_of(1, 8), 1)
        engine.step()
        assert not engine.core.has_requests
        assert sum(engine.link.held().values()) == 2
        assert engine.pool.available == 6
        engine.finish()
        assert engine.pool.available == 8

    def test_a_worker_that_takes_no_plan_is_answered_for(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.tiers.broken.add("execute")
        engine.run(prompt_of(1, 9))
        assert engine.link.held() == Counter()


class TestLoads:
    def test_usage_tells_the_tiers_apart(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.tiers.tier = Tier.DISK
        engine.run(prompt_of(1, 17), 1)
        engine.lose_hbm()
        engine.run(prompt_of(1, 9), 1)
        answer = engine.run(prompt_of(1, 9) + prompt_of(1, 17)[9:], 1)
        assert answer.usage.cached_by_tier == {Tier.HBM: 8}
        answer = engine.run(prompt_of(1, 17), 1)
        assert answer.usage.cached_by_tier == {Tier.HBM: 8, Tier.DISK: 8}
        assert engine.core.stats().hit_tokens == {Tier.HBM: 8 + 8, Tier.DISK: 8 + 8}

    def test_b06_only_fresh_blocks_are_written(self) -> None:
        """Block 4, chunk 8: the pool has 4 tokens of a chunk, the tiers all 8."""
        engine = ToyEngine(tiers=True, chunk_tokens=8)
        engine.run(prompt_of(1, 14), 1)
        engine.lose_hbm()
        engine.run([*prompt_of(1, 14)[:4], 7], 1)
        shared = engine.runner.steps[-1].rows[0].block_ids[0][0]
        before = engine.runner.context([shared], BLOCK)
        answer = engine.run([*prompt_of(1, 14), 1, 2, 3])
        assert answer.usage.cached_by_tier == {Tier.HBM: 4, Tier.DRAM: 4}
        assert engine.runner.steps[-1].rows[0].block_ids[0][0] == shared
        assert engine.runner.context([shared], BLOCK) == before
        (load,) = engine.tiers.loads
        assert load.blocks.start_token == 4
        assert shared not in load.blocks.block_ids[0]

    def test_b06_a_local_hit_beyond_the_last_chunk_loads_nothing(self) -> None:
        engine = ToyEngine(tiers=True, chunk_tokens=8)
        engine.run(prompt_of(1, 14), 1)
        answer = engine.run([*prompt_of(1, 14), 1, 2, 3])
        assert answer.usage.cached_by_tier == {Tier.HBM: 12}
        assert engine.tiers.loads == []

    def test_prompt_logprobs_do_not_read_the_tiers(self) -> None:
        engine = ToyEngine(tiers=True)
        request = engine.request(prompt_of(1, 9))
        scored = replace(request, sampling=replace(request.sampling, prompt_logprobs=0))
        engine.send(scored)
        engine.finish()
        assert engine.tiers.lookups == 0
        assert engine.tiers.chunks, "but they write to them"

    def test_b161_a_lookup_is_counted_when_the_request_is_admitted(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 9), 1)
        engine.lose_hbm()
        engine.tiers.admissions.clear()
        engine.tiers.pending_lookups = 5
        answer = engine.submit(prompt_of(1, 9), 1)
        engine.finish()
        assert engine.tiers.lookups > 5
        assert engine.tiers.admissions == [(0, 9, 8)]
        assert answer.cached == 8
        assert engine.tiers.costs.bounded == [(9, 0)] * 5, "it could begin, and waits"

    def test_b161_a_preempted_request_is_not_counted_again(self) -> None:
        engine = ToyEngine(6, tiers=True)
        answers = [engine.submit(prompt_of(seed, 8), 9) for seed in (1, 2)]
        engine.finish()
        assert engine.core.stats().preemptions == 1
        assert engine.tiers.admissions == [(0, 8, 0), (0, 8, 0)]
        for answer in answers:
            answer.check()

    def test_b161_nor_is_one_that_hbm_answered_at_first(self) -> None:
        engine = ToyEngine(6, tiers=True)
        engine.run(prompt_of(2, 9), 1)
        answers = [engine.submit(prompt_of(seed, 8 + seed // 2), 9) for seed in (1, 2)]
        lookups = engine.tiers.lookups
        engine.finish()
        assert engine.core.stats().preemptions == 1
        assert engine.tiers.lookups > lookups + 1, "it was looked up when it came back"
        assert engine.tiers.admissions == [(0, 9, 0), (0, 8, 0), (8, 9, 8)]
        for answer in answers:
            answer.check()


class TestPreparing:
    """What waits for blocks is brought near meanwhile."""

    def waiting(self) -> ToyEngine:
        """An engine without room for what its tiers hold."""
        engine = ToyEngine(12, tiers=True)
        engine.run(prompt_of(1, 33), 1)
        engine.lose_hbm()
        engine.submit(prompt_of(2, 20), 20)
        engine.step()
        return engine

    def test_a_request_that_waits_for_room_is_prepared_once(self) -> None:
        engine = self.waiting()
        answer = engine.submit(prompt_of(1, 33), 1)
        engine.step(5)
        assert engine.tiers.prefetches == [(0, 32)]
        assert engine.tiers.admissions[-1:] != [(0, 33, 32)], "it is not admitted yet"
        engine.finish()
        answer.check()
        assert engine.tiers.prefetches == [(0, 32)]

    def test_it_is_prepared_when_the_tiers_have_found_out(self) -> None:
        engine = self.waiting()
        engine.tiers.pending_lookups = 3
        engine.submit(prompt_of(1, 33), 1)
        engine.step(2)
        assert engine.tiers.prefetches == []
        engine.step(4)
        assert engine.tiers.prefetches == [(0, 32)]
        assert engine.tiers.costs.bounded == [], "nothing is lost while it waits for room"
        engine.finish()

    def test_a_cache_that_cannot_prepare_costs_nothing_but_a_fault(self) -> None:
        engine = self.waiting()
        engine.tiers.broken.add("prefetch")
        answer = engine.submit(prompt_of(1, 33), 1)
        engine.finish()
        answer.check()
        assert engine.link.faults == 1

    def test_one_that_is_admitted_at_once_is_not_prepared(self) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 17), 1)
        engine.lose_hbm()
        engine.run(prompt_of(1, 17), 1)
        assert engine.tiers.prefetches == []


class TestFaults:
    @pytest.mark.parametrize(
        "method",
        [
            "sequence",
            "match",
            "choose",
            "note_admission",
            "begin_load",
            "begin_store",
            "execute",
            "finish",
            "store_done",
            "worker.poll",
            "load.poll",
        ],
    )
    def test_a_cache_that_raises_costs_a_miss(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = ToyEngine(tiers=True)
        engine.run(prompt_of(1, 9))
        engine.lose_hbm()
        engine.tiers.broken.add(method)
        answer = engine.submit(prompt_of(1, 13))
        engine.step(30)
        engine.tiers.broken.clear()
        engine.finish()
        answer.check()
        assert engine.link.faults > 0
        logged = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(logged) == 1, "one line a minute, not one per fault"

    def test_blocks_of_a_broken_load_stay_out_of_use_until_it_ends(self) -> None:
        engine = ToyEngine(8, tiers=True)
        engine.run(prompt_of(1, 13), 1)
        engine.lose_hbm()
        engine.tiers.load_polls = 20
        answer = engine.submit(prompt_of(1, 13), 3)
        engine.step()
        engine.tiers.broken.add("load.poll")
        engine.step(8)
        assert answer.done, "served without the tiers"
        answer.check()
        assert sum(engine.link.held().values()) >= 3
        engine.tiers.broken.clear()
        engine.finish()

    def test_without_a_cache_nothing_is_asked(self) -> None:
        engine = ToyEngine()
        link = NoLink()
        request_like = engine.submit([1, 2, 3])
        engine.finish()
        request_like.check()
        assert link.poll() == []
        assert link.held() == Counter()
        assert link.faults == 0
