"""Who runs, who waits, who gives way. The toy engine is stepped by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.errors import ConfigError
from kvtier_engine.decisions import blocks_for, load_end, rank, usable_tokens
from kvtier_engine.refusal import (
    ContextLengthError,
    EngineLimits,
    RequestRefusedError,
    check_request,
)
from kvtier_engine.scheduler import ADMISSION_SCAN_MAX
from kvtier_engine.scheduling import SchedulerConfig
from tests.lib.toy_engine import BLOCK, Answer, ToyEngine, prompt_of
from tests.lib.toy_model import VOCAB


def config_of(seqs: int, budget: int) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)


def fed(engine: ToyEngine) -> list[list[int]]:
    """Tokens per row, step by step, in the order of the batch."""
    return [[len(row.token_ids) for row in batch.rows] for batch in engine.runner.steps]


class TestDecisions:
    def test_blocks_for(self) -> None:
        assert [blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]

    def test_b15_one_token_is_always_computed(self) -> None:
        assert [usable_tokens(n, 4) for n in (1, 4, 5, 8, 9, 12)] == [0, 0, 4, 4, 8, 8]

    def test_b125_what_is_left_to_load_is_never_negative(self) -> None:
        """The tiers hold 4 tokens; the pool holds more, as much, or none of them."""
        assert load_end(8, 4, 8, 4) is None
        assert load_end(4, 4, 8, 4) is None
        assert load_end(0, 4, 8, 4) == 4

    def test_a_load_ends_at_whole_blocks_and_leaves_a_token_to_compute(self) -> None:
        assert load_end(0, 8, 4, 4) == 4
        assert load_end(4, 256, 252, 16) == 240

    def test_rank_is_arrival_unless_priorities_differ(self) -> None:
        assert rank(5.0, 0, 1, 60.0) < rank(5.0, 0, 2, 60.0) < rank(6.0, 0, 0, 60.0)
        assert rank(50.0, -1, 2, 60.0) < rank(0.0, 0, 1, 60.0) < rank(0.0, 1, 0, 60.0)
        assert rank(61.0, -1, 2, 60.0) > rank(0.0, 0, 1, 60.0), "a priority is worth 60 seconds"


class TestRefusals:
    LIMITS = EngineLimits(context_tokens=16, vocab_size=VOCAB)

    def check(self, prompt: int, max_tokens: int, *, blocks: int = 8, token: int = 1) -> None:
        request = ToyEngine(8).request([token] * prompt, max_tokens)
        check_request(request, self.LIMITS, blocks, BLOCK)

    def test_what_fits_exactly_is_taken(self) -> None:
        self.check(15, 1)
        self.check(1, 15)
        self.check(8, 5, blocks=3)

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(20, 1), (10, 10), (16, 1)])
    def test_the_context_is_a_limit(self, prompt: int, max_tokens: int) -> None:
        with pytest.raises(ContextLengthError, match="the model's context holds 16") as caught:
            self.check(prompt, max_tokens)
        error = caught.value
        assert (error.prompt_tokens, error.max_tokens, error.limit) == (prompt, max_tokens, 16)

    def test_the_pool_is_a_limit(self) -> None:
        with pytest.raises(ContextLengthError, match="the KV pool holds 12"):
            self.check(8, 6, blocks=3)

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "token"), [(0, 1, 1), (1, 0, 1), (1, 1, VOCAB), (1, 1, -1)]
    )
    def test_nonsense_is_refused(self, prompt: int, max_tokens: int, token: int) -> None:
        with pytest.raises(RequestRefusedError):
            self.check(prompt, max_tokens, token=token)

    def test_what_fits_exactly_into_the_pool_is_served_to_its_end(self) -> None:
        engine = ToyEngine(3)
        engine.run(prompt_of(1, 8), 5)

    def test_limits_of_a_step_are_checked(self) -> None:
        with pytest.raises(ConfigError, match="max_num_seqs"):
            config_of(0, 4)
        with pytest.raises(ConfigError, match="max_num_batched_tokens"):
            config_of(4, 3)


class TestBatching:
    def test_a_long_prompt_is_computed_in_chunks(self) -> None:
        engine = ToyEngine(config=config_of(2, 8))
        engine.run(prompt_of(1, 20), 2)
        assert fed(engine) == [[8], [8], [4], [1]]

    def test_decodes_go_first_and_prefill_takes_the_rest(self) -> None:
        engine = ToyEngine(config=config_of(4, 8))
        first = engine.submit(prompt_of(1, 4), 6)
        engine.step()
        second = engine.submit(prompt_of(2, 20), 2)
        engine.finish()
        first.check()
        second.check()
        assert fed(engine) == [[4], [1, 7], [1, 7], [1, 6], [1, 1], [1]]

    def test_no_more_sequences_than_allowed(self) -> None:
        engine = ToyEngine(config=config_of(2, 64))
        answers = [engine.submit(prompt_of(i, 3), 4) for i in range(5)]
        engine.finish()
        assert max(len(step) for step in fed(engine)) == 2
        for answer in answers:
            answer.check()

    def test_first_come_first_served(self) -> None:
        engine = ToyEngine(config=config_of(1, 64))
        answers = [engine.submit(prompt_of(i, 3), 2) for i in range(3)]
        assert order_of_ends(engine, answers) == [0, 1, 2]

    def test_a_lower_priority_number_goes_first(self) -> None:
        engine = ToyEngine(config=config_of(1, 64))
        answers = [engine.submit(prompt_of(i, 3), 2, priority=p) for i, p in enumerate([1, 0, -1])]
        assert order_of_ends(engine, answers) == [2, 1, 0]

    def test_a_request_that_lacks_room_is_not_passed(self) -> None:
        """Small ones behind it would keep it waiting for ever."""
        engine = ToyEngine(8, config=config_of(4, 64))
        running = engine.submit(prompt_of(1, 12), 5)
        engine.step()
        big, small = engine.submit(prompt_of(2, 24), 2), engine.submit(prompt_of(3, 2), 2)
        engine.step(2)
        assert not small.deltas
        engine.finish()
        for answer in (running, big, small):
            answer.check()

    def test_only_so_many_waiting_requests_are_looked_at(self) -> None:
        engine = ToyEngine(blocks=256, tiers=True, config=config_of(4, 64))
        engine.tiers.pending_lookups = 3
        asking = [engine.submit(prompt_of(1, 9), 2, salt=str(i)) for i in range(ADMISSION_SCAN_MAX)]
        last = engine.submit([1], 2)
        engine.step()
        assert engine.tiers.lookups == ADMISSION_SCAN_MAX
        assert not last.deltas
        engine.finish()
        for answer in [*asking, last]:
            answer.check()


def order_of_ends(engine: ToyEngine, answers: list[Answer]) -> list[int]:
    ended: list[int] = []
    while len(ended) < len(answers):
        engine.step()
        ended += [i for i, answer in enumerate(answers) if answer.done and i not in ended]
    return ended


class TestPrefixes:
    def test_b15_fully_cached_prompts_of_whole_blocks(self) -> None:
        engine = ToyEngine()
        for length, cached in ((4, 0), (8, 4), (12, 8)):
            prompt = prompt_of(length, length)
            assert [engine.run(prompt).cached for _ in range(3)] == [0, cached, cached]

    def test_b17_a_warm_prefill_feeds_only_what_is_missing(self) -> None:
        engine = ToyEngine()
        cold = engine.run(prompt_of(1, 12))
        engine.runner.steps.clear()
        warm = engine.run(prompt_of(1, 12))
        assert warm.tokens == cold.tokens
        (row,) = engine.runner.steps[0].rows
        assert (row.start, len(row.token_ids)) == (8, 4)
        assert len(row.block_ids[0]) * BLOCK == 12, "it attends to 12 keys"

    def test_generated_tokens_are_found_too(self) -> None:
        engine = ToyEngine()
        first = engine.run(prompt_of(1, 6), 7)
        answer = engine.run([*prompt_of(1, 6), *first.tokens, 1], 2)
        assert answer.cached == 12, "6 + 7 tokens, of which the last one's KV was never computed"

    def test_requests_with_one_prompt_compute_it_once(self) -> None:
        engine = ToyEngine(config=config_of(4, 8))
        answers = [engine.submit(prompt_of(1, 20), 3) for _ in range(4)]
        engine.finish()
        for answer in answers:
            answer.check()
        assert [answer.cached for answer in answers] == [0, 16, 16, 16]
        assert sum(map(sum, fed(engine))) == 20 + 3 * 4 + 4 * 2

    def test_tenants_share_nothing(self) -> None:
        engine = ToyEngine(tiers=True)
        cached = [engine.run(prompt_of(1, 9), salt=salt).cached for salt in ("a", "a", "b", "")]
        assert cached == [0, 8, 0, 0]

    def test_b12_after_sleep_nothing_is_reused(self) -> None:
        engine = ToyEngine()
        engine.run(prompt_of(1, 8))
        engine.lose_hbm()
        assert engine.pool.indexed == 0
        assert engine.run(prompt_of(1, 8)).cached == 0

    def test_b12_running_requests_start_over(self) -> None:
        engine = ToyEngine(config=config_of(2, 8))
        answers = [engine.submit(prompt_of(i, 10), 6) for i in range(3)]
        engine.step(4)
        engine.lose_hbm()
        engine.finish()
        for answer in answers:
            answer.check()

    def test_b153_prompt_logprobs_are_computed_in_full_each_time(self) -> None:
        engine = ToyEngine(tiers=True, config=config_of(2, 4))
        scored = [run_scored(engine, prompt_of(1, 9)) for _ in range(2)]
        longer = run_scored(engine, [*prompt_of(1, 9)[:8], 5, 6, 7])
        plain = run_scored(ToyEngine(), prompt_of(1, 9))
        assert scored[0].prompt_logprobs == scored[1].prompt_logprobs == plain.prompt_logprobs
        assert len(scored[0].prompt_logprobs) == 9
        assert scored[0].prompt_logprobs[0] is None
        assert None not in scored[0].prompt_logprobs[1:]
        assert longer.prompt_logprobs[:8] == plain.prompt_logprobs[:8]
        assert [answer.cached for answer in (*scored, longer)] == [0, 0, 0]
        assert run_scored(engine, [5]).prompt_logprobs == (None,)

    def test_b153_prompt_logprobs_survive_preemption(self) -> None:
        engine = ToyEngine(7, config=config_of(2, 2))
        first = engine.submit(prompt_of(1, 8), 14)
        engine.step(5)
        request = engine.request(prompt_of(2, 9), 4)
        scored = engine.send(
            replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
        )
        engine.finish()
        first.check()
        scored.check()
        assert engine.core.stats().preemptions > 0
        assert scored.prompt_logprobs == run_scored(ToyEngine(), prompt_of(2, 9)).prompt_logprobs


def run_scored(engine: ToyEngine, prompt: list[int]) -> Answer:
    request = engine.request(prompt, 3)
    answer = engine.send(replace(request, sampling=replace(request.sampling, prompt_logprobs=1)))
    engine.finish()
    answer.check()
    return answer


class TestPreemption:
    def test_the_last_in_line_gives_way_and_keeps_its_tokens(self) -> None:
        engine = ToyEngine(6, config=config_of(2, 64))
        first, second = engine.submit(prompt_of(1, 8), 9), engine.submit(prompt_of(2, 8), 9)
        engine.finish()
        first.check()
        second.check()
        assert engine.core.stats().preemptions == 1
        again = engine.runner.steps[-1].rows[-1]
        assert again.row == 0, "the first one's row"

    def test_a_lower_priority_gives_way_to_an_earlier_one(self) -> None:
        engine = ToyEngine(6, config=config_of(2, 64))
        low = engine.submit(prompt_of(1, 8), 9, priority=1)
        engine.step()
        high = engine.submit(prompt_of(2, 8), 9)
        assert order_of_ends(engine, [low, high]) == [1, 0]
        assert engine.core.stats().preemptions == 1
        engine.finish()

    def test_b160_what_a_preempted_request_finds_again_is_no_hit(self) -> None:
        engine = ToyEngine(8, config=config_of(4, 64))
        answers = [engine.submit(prompt_of(i, 9), 9) for i in range(20)]
        engine.finish()
        for answer in answers:
            answer.check()
            assert answer.cached == 0
        stats = engine.core.stats()
        assert stats.preemptions > 0
        assert stats.hit_tokens == {}
        assert stats.prompt_tokens == 20 * 9, "each prompt counts once"
        assert stats.refound_tokens > 0

    def test_nobody_is_preempted_for_blocks_that_a_store_still_holds(self) -> None:
        engine = ToyEngine(11, tiers=True, config=config_of(3, 64))
        first, second = engine.submit(prompt_of(1, 8), 12), engine.submit(prompt_of(2, 8), 12)
        engine.step(4)
        engine.tiers.store_polls = 12
        third = engine.submit(prompt_of(3, 8), 7)
        engine.step(6)
        assert engine.core.stats().preemptions == 1, "the second; the third's would not help"
        engine.finish()
        for answer in (first, second, third):
            answer.check()

    def test_growing_never_takes_from_those_before_it(self) -> None:
        engine = ToyEngine(6, config=config_of(3, 64))
        answers = [engine.submit(prompt_of(i, 8), 9) for i in range(3)]
        assert order_of_ends(engine, answers) == [0, 1, 2]
        engine.finish()
