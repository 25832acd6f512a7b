"""Days of a small engine under pressure, from seeds: every answer is the right one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import FinishReason
from tests.lib.toy_engine import Answer, ToyEngine, prompt_of

DAYS = 32
REQUESTS = 32
TRUNKS = [prompt_of(seed, 24) for seed in range(3)]
#: What the days together must have met, or the simulation has lost its bite.
MET = {"preemptions", "loads_given_up", "failed_loads", "hits", "refound", "aborts", "step_errors"}


class Day:
    """One engine, its arrivals and its bad luck, all drawn from one generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        seqs = rng.randint(1, 5)
        config = SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=max(seqs, rng.choice([4, 8, 16, 64]))
        )
        self.engine = ToyEngine(
            rng.randint(10, 18),
            tiers=rng.random() < 0.9,
            chunk_tokens=rng.choice([4, 8]),
            config=config,
        )
        self.engine.tiers.load_polls = rng.choice([0, 1, 20])
        self.engine.tiers.costs.split_token = rng.choice([None, 4, 8, 16])
        self.engine.tiers.costs.worth_tokens = rng.choice([1 << 30, 12])
        self.answers: list[Answer] = []
        self.met: Counter[str] = Counter()

    def live(self) -> Counter[str]:
        """Serve the day's requests to their end."""
        while len(self.answers) < REQUESTS:
            for _ in range(self.rng.randint(0, 4)):
                self.arrive()
            self.fortune()
            self.engine.step(self.rng.randint(1, 3))
        self.engine.finish()
        self.close_the_books()
        return self.met

    def arrive(self) -> None:
        rng = self.rng
        trunk = rng.choice(TRUNKS)
        tail = [rng.randrange(90) for _ in range(rng.randint(0, 3))]
        prompt = [*trunk[: rng.choice([1, 7, 8, 12, 16, 20])], *tail]
        salt = rng.choice(["", "", "", "tenant"])
        priority = rng.choice([0, 0, 0, -2, 2])
        self.answers.append(
            self.engine.submit(prompt, rng.randint(1, 16), salt=salt, priority=priority)
        )

    def fortune(self) -> None:
        """Change one thing about the tiers, the runner or the clients."""
        rng, tiers = self.rng, self.engine.tiers
        match rng.randrange(9):
            case 0:
                tiers.load_polls = rng.choice([0, 1, 6, 20])
            case 1:
                tiers.store_polls = rng.choice([0, 1, 6])
            case 2:
                tiers.failing_chunks = {rng.randrange(6) for _ in range(rng.randint(0, 2))}
            case 3:
                tiers.pending_lookups = rng.choice([0, 0, 2])
            case 4:
                tiers.refuse_stores = rng.random() < 0.3
            case 5 if tiers.chunks:
                del tiers.chunks[rng.choice(sorted(tiers.chunks))]
            case 6 if self.answers and rng.random() < 0.5:
                self.engine.core.abort(rng.choice(self.answers).request.request_id)
            case 7 if rng.random() < 0.2:
                self.engine.runner.failure = RuntimeError("device lost")
            case 8:
                self.engine.clock.advance(rng.choice([0.0, 1.0, 61.0]))

    def close_the_books(self) -> None:
        stats = self.engine.core.stats()
        for answer in self.answers:
            if answer.finish_reason is FinishReason.LENGTH:
                answer.check()
            else:
                assert answer.finish_reason in {FinishReason.ABORT, FinishReason.ERROR}
        done = [a for a in self.answers if a.finish_reason is FinishReason.LENGTH]
        assert stats.finished.get(FinishReason.LENGTH, 0) == len(done)
        assert stats.generated_tokens == sum(len(a.tokens) for a in self.answers)
        lost = sum(stats.finished.get(r, 0) for r in (FinishReason.ABORT, FinishReason.ERROR))
        assert len(done) + lost == len(self.answers)
        self.met["preemptions"] = stats.preemptions
        self.met["loads_given_up"] = stats.loads_given_up
        self.met["hits"] = sum(stats.hit_tokens.values())
        self.met["refound"] = stats.refound_tokens
        self.met["aborts"] = stats.finished.get(FinishReason.ABORT, 0)
        self.met["step_errors"] = stats.step_errors
        self.met["failed_loads"] = sum(
            load.outcome is not None and bool(load.outcome.misses)
            for load in self.engine.tiers.loads
        )


def test_days_under_pressure(seed: int, scale: int) -> None:
    met: Counter[str] = Counter()
    for day in range(DAYS * scale):
        try:
            met += Day(random.Random(seed + day)).live()
        except AssertionError as error:
            error.add_note(f"day {day} of seed {seed}")
            raise
    assert set(met) >= MET, met


@pytest.mark.parametrize("priority", [-1, 1])
def test_no_priority_starves_another(rng: random.Random, priority: int) -> None:
    """A stream of one priority never keeps a request of another waiting for good."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, priority_step_s=10.0)
    engine = ToyEngine(12, config=config)
    streamed = [engine.submit(prompt_of(1, 9), 4, priority=priority)]
    ours = engine.submit(prompt_of(2, 9), 4, priority=0)
    for _ in range(100):
        if ours.done:
            break
        while sum(not answer.done for answer in streamed) < 6:
            streamed.append(engine.submit(prompt_of(rng.randrange(80), 9), 4, priority=priority))
        engine.clock.advance(1.0)
        engine.step()
    assert ours.done, "still waiting after 100 seconds"
    engine.finish()
    for answer in [ours, *streamed]:
        answer.check()
