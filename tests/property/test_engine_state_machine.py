"""Any order of requests, steps, aborts and faults of the tiers: every answer is the right one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import FinishReason
from tests.lib.toy_engine import Answer, ToyEngine, prompt_of

TRUNK = prompt_of(3, 20)
BROKEN = ("sequence", "match", "choose", "note_admission", "begin_load", "begin_store", "load.poll")
BROKEN_ANSWERS = ("finish", "store_done", "execute", "worker.poll")


class EngineMachine(RuleBasedStateMachine):
    """The oracle is each request computed alone; the books are checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self.may_fail: set[str] = set()

    @initialize(
        blocks=st.integers(8, 20),
        chunk_tokens=st.sampled_from([4, 8, 16]),
        tiers=st.booleans(),
        seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
    )
    def start(self, blocks: int, chunk_tokens: int, tiers: bool, seqs: int, budget: int) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.engine = ToyEngine(blocks, tiers=tiers, chunk_tokens=chunk_tokens, config=config)
        self.tiers = self.engine.tiers

    @rule(
        shared=st.integers(0, 20),
        tail=st.lists(st.integers(0, 3), max_size=3),
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from(["", "tenant"]),
        priority=st.integers(-1, 1),
        scored=st.booleans(),
    )
    def submit(
        self, shared: int, tail: list[int], max_tokens: int, salt: str, priority: int, scored: bool
    ) -> None:
        prompt = [*TRUNK[: min(shared, 20 - len(tail))], *tail] or [1]
        request = self.engine.request(prompt, max_tokens, salt=salt, priority=priority)
        if scored:
            request = replace(request, sampling=replace(request.sampling, prompt_logprobs=0))
        self.answers.append(self.engine.send(request))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.engine.step(count)

    @precondition(lambda self: self.answers)
    @rule(pick=st.data())
    def abort(self, pick: st.DataObject) -> None:
        answer = pick.draw(st.sampled_from(self.answers))
        self.engine.core.abort(answer.request.request_id)
        assert answer.done

    @rule()
    def fail_next_step(self) -> None:
        self.engine.runner.failure = RuntimeError("device lost")

    @rule(seconds=st.sampled_from([0.1, 30.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @rule()
    def forget(self) -> None:
        self.engine.core.forget_prefixes()

    @rule(loads=st.integers(0, 5), stores=st.integers(0, 5), lookups=st.integers(0, 3))
    def slow_tiers(self, loads: int, stores: int, lookups: int) -> None:
        self.tiers.load_polls, self.tiers.store_polls = loads, stores
        self.tiers.pending_lookups = lookups

    @rule(split=st.sampled_from([None, 4, 8]), worth=st.sampled_from([1 << 30, 4, 0]))
    def priced_tiers(self, split: int | None, worth: int) -> None:
        self.tiers.costs.split_token, self.tiers.costs.worth_tokens = split, worth

    @rule(chunks=st.sets(st.integers(0, 4)), refuse=st.booleans(), most=st.integers(1, 3))
    def faulty_tiers(self, chunks: set[int], refuse: bool, most: int) -> None:
        self.tiers.failing_chunks = chunks
        self.tiers.refuse_stores, self.tiers.store_chunks_max = refuse, most

    @rule(broken=st.sets(st.sampled_from(BROKEN + BROKEN_ANSWERS), max_size=3))
    def broken_tiers(self, broken: set[str]) -> None:
        self.tiers.broken.clear()
        self.tiers.broken.update(broken)

    @precondition(lambda self: self.tiers.chunks)
    @rule(pick=st.data())
    def lose_a_chunk(self, pick: st.DataObject) -> None:
        del self.tiers.chunks[pick.draw(st.sampled_from(sorted(self.tiers.chunks)))]

    @invariant()
    def no_answer_is_wrong(self) -> None:
        for answer in self.answers:
            if answer.done and answer.finish_reason is FinishReason.LENGTH:
                answer.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tiers.broken.clear()
        self.engine.runner.failure = None
        if self.tiers.idle or self.engine.core.busy:
            self.engine.finish()
        kept = [a for a in self.answers if a.finish_reason is not FinishReason.ERROR]
        for answer in kept:
            if answer.finish_reason is not FinishReason.ABORT:
                answer.check()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(stateful_step_count=40)
