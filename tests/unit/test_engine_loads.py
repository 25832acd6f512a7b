"""Requests that wait for a load: what they hold, whom they hold up, when they give way."""

from __future__ import annotations

from kvtier.types import Tier
from kvtier_engine.scheduling import SchedulerConfig
from tests.lib.toy_engine import Answer, ToyEngine, prompt_of


def config_of(seqs: int, budget: int) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)


def fed_tokens(engine: ToyEngine) -> int:
    """Tokens computed so far."""
    return sum(batch.token_count for batch in engine.runner.steps)


class TestLoads:
    def test_b56_parked_loads_do_not_keep_the_first_in_line_waiting(self) -> None:
        """Pool of 10; two loads hold 4 each; one that ranks before them needs 8."""
        for priority in (0, -1):
            engine = ToyEngine(10, tiers=True, config=config_of(4, 64))
            for seed in (1, 2):
                engine.run(prompt_of(seed, 13), 3)
            engine.lose_hbm()
            engine.tiers.load_polls = 5
            parked = [engine.submit(prompt_of(seed, 13), 3) for seed in (1, 2)]
            engine.step()
            assert engine.core.stats().loading == 2
            urgent = engine.submit(prompt_of(3, 29), 3, priority=priority)
            assert engine.finish() <= 100
            for answer in (*parked, urgent):
                answer.check()

    def test_b47_what_was_evicted_from_hbm_is_found_below(self) -> None:
        """HBM of 4 blocks; noise drives the prompt out; also where another one shares its start."""
        for between in ((), (prompt_of(1, 5)[:4] + prompt_of(8, 5),)):
            engine = ToyEngine(4, tiers=True)
            prompt = prompt_of(1, 9)
            engine.run(prompt, 3)
            for noise in (*between, *(prompt_of(seed, 9) for seed in (2, 3, 4, 5))):
                engine.run(noise, 3)
            again = engine.run(prompt, 3)
            assert again.usage.cached_by_tier == {Tier.DRAM: 8}

    def test_a_load_is_given_up_when_nothing_else_can_run(self) -> None:
        engine = ToyEngine(10, tiers=True, config=config_of(4, 64))
        engine.run(prompt_of(1, 13), 3)
        engine.lose_hbm()
        engine.tiers.load_polls = 50
        parked = engine.submit(prompt_of(1, 13), 3)
        engine.step()
        urgent = engine.submit(prompt_of(3, 29), 3, priority=-1)
        engine.step()
        assert engine.core.stats().loads_given_up == 1
        assert engine.core.stats().waiting == 2
        engine.finish()
        assert order_of_last_tokens(engine, [urgent, parked])
        for answer in (parked, urgent):
            answer.check()

    def test_no_more_loads_are_given_up_than_needed(self) -> None:
        engine = ToyEngine(12, tiers=True, config=config_of(4, 64))
        for seed in (1, 2):
            engine.run(prompt_of(seed, 13), 3)
        engine.lose_hbm()
        engine.tiers.load_polls = 10
        parked = [engine.submit(prompt_of(seed, 13), 3) for seed in (1, 2)]
        engine.step()
        urgent = engine.submit(prompt_of(3, 29), 3, priority=-1)
        engine.finish()
        assert engine.core.stats().loads_given_up == 1
        for answer in (*parked, urgent):
            answer.check()

    def test_a_loaded_request_gets_its_row_from_one_behind_it(self) -> None:
        """One row: its holder needs a block, the loaded one before it holds the rest."""
        engine = ToyEngine(8, tiers=True, config=config_of(1, 64))
        engine.run(prompt_of(1, 20), 3)
        engine.lose_hbm()
        engine.tiers.load_polls = 3
        loaded = engine.submit(prompt_of(1, 20), 5)
        engine.step()
        junior = engine.submit(prompt_of(2, 8), 9)
        engine.finish()
        for answer in (loaded, junior):
            answer.check()
        assert engine.core.stats().preemptions == 1
        assert loaded.cached == 16

    def test_b58_pending_lookups_take_no_row(self) -> None:
        engine = ToyEngine(tiers=True, config=config_of(2, 64))
        for seed in (1, 2):
            engine.run(prompt_of(seed, 9))
        engine.lose_hbm()
        engine.tiers.pending_lookups = 30
        asking = [engine.submit(prompt_of(seed, 9)) for seed in (1, 2)]
        engine.step()
        third = engine.submit([1, 2, 3])
        engine.step()
        assert third.deltas, "it runs at once"
        engine.finish()
        for answer in (*asking, third):
            answer.check()
        assert [answer.cached for answer in asking] == [8, 8]

    def test_b62_requests_that_share_a_load_wait_for_it_together(self) -> None:
        engine = ToyEngine(tiers=True)
        prompts = [[*prompt_of(1, 9)[:8], 60 + i] for i in range(10)]
        engine.run(prompts[0])
        engine.lose_hbm()
        engine.tiers.load_polls = 5
        answers = [engine.submit(prompt) for prompt in prompts]
        engine.step()
        assert engine.core.stats().loading == 1
        steps = 1
        while not all(answer.deltas for answer in answers):
            engine.step()
            steps += 1
        assert steps <= 10, "one load's time, not ten"
        assert engine.tiers.chunk_reads == 2
        engine.finish()
        for answer in answers:
            answer.check()
        assert [answer.cached for answer in answers] == [8] * 10
        assert answers[0].usage.cached_by_tier == {Tier.DRAM: 8}
        assert answers[1].usage.cached_by_tier == {Tier.HBM: 8}

    def test_b62_when_the_shared_load_fails_the_prefix_is_computed_once(self) -> None:
        engine = ToyEngine(tiers=True)
        prompts = [[*prompt_of(1, 9)[:8], 60 + i] for i in range(10)]
        engine.run(prompts[0])
        engine.lose_hbm()
        engine.tiers.load_polls, engine.tiers.failing_chunks = 5, {0}
        engine.runner.steps.clear()
        answers = [engine.submit(prompt) for prompt in prompts]
        steps = engine.finish()
        for answer in answers:
            answer.check()
        assert len(engine.tiers.loads) == 1
        assert steps <= 20
        assert fed_tokens(engine) == 9 + 9 * 1 + 10 * 4

    def test_no_more_loads_at_once_than_sequences(self) -> None:
        engine = ToyEngine(tiers=True, config=config_of(2, 64))
        for seed in range(4):
            engine.run(prompt_of(seed, 9))
        engine.lose_hbm()
        engine.tiers.load_polls = 5
        answers = [engine.submit(prompt_of(seed, 9)) for seed in range(4)]
        engine.step()
        assert engine.core.stats().loading == 2
        engine.finish()
        for answer in answers:
            answer.check()
            assert answer.cached == 8


def order_of_last_tokens(engine: ToyEngine, answers: list[Answer]) -> bool:
    """True when the answers ended in this order, by the last step that fed their last position."""
    ends = []
    for answer in answers:
        last = len(answer.request.prompt) + len(answer.tokens) - 2
        ends.append(
            max(
                index
                for index, batch in enumerate(engine.runner.steps)
                for row in batch.rows
                if row.start + len(row.token_ids) - 1 == last
            )
        )
    return ends == sorted(ends)
