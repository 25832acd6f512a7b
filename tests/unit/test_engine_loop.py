"""The engine's thread: waking, sleeping, answering, stopping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.clock import SystemClock
from kvtier_engine.delta_stream import DeltaStream, merged
from kvtier_engine.engine import Engine
from kvtier_engine.refusal import (
    ContextLengthError,
    EngineLimits,
    EngineStoppedError,
    QueueFullError,
    RequestRefusedError,
)
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import Delta, FinishReason, Usage
from tests.lib.toy_engine import WAIT_S, Answer, Client, ToyEngine, prompt_of
from tests.lib.toy_model import VOCAB, reference

LIMITS = EngineLimits(context_tokens=4096, vocab_size=VOCAB, requests_max=8)


@contextmanager
def serving(toy: ToyEngine, limits: EngineLimits = LIMITS) -> Iterator[Engine]:
    """Run the toy's core in a thread; afterwards nothing is held."""
    engine = Engine(toy.core, limits, SystemClock())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)
    if not engine.stats().error:
        toy.check_idle()


def send(engine: Engine, toy: ToyEngine, prompt: list[int], max_tokens: int = 5) -> Client:
    client = Client(toy.request(prompt, max_tokens))
    engine.submit(client.request, client.take)
    return client


class TestServing:
    def test_requests_from_many_threads(self) -> None:
        toy = ToyEngine(24, config=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16))
        clients: list[Client] = []

        def visit(seed: int) -> None:
            client = send(engine, toy, prompt_of(seed, 9))
            clients.append(client)
            client.wait()

        with serving(toy) as engine:
            threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for client in clients:
            client.check()
        assert len(clients) == 8

    def test_stats_tell_what_happened(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            send(engine, toy, prompt_of(1, 9)).wait()
            send(engine, toy, prompt_of(1, 9)).wait()
            stats = engine.stats()
        assert (stats.running, stats.waiting, stats.loading) == (0, 0, 0)
        assert stats.blocks_used == 0
        assert stats.blocks_cached == 3
        assert stats.prompt_tokens == 18
        assert stats.generated_tokens == 10
        assert sum(stats.hit_tokens.values()) == 8
        assert stats.finished == {FinishReason.LENGTH: 2}
        assert sum(stats.ttft.counts) == 2
        assert sum(stats.itl.counts) == 8
        assert stats.steps == 10

    def test_b128_after_a_failed_load_the_only_request_goes_on(self) -> None:
        toy = ToyEngine(tiers=True)
        toy.run(prompt_of(1, 9))
        toy.core.forget_prefixes()
        toy.tiers.failing_chunks, toy.tiers.load_polls = {0, 1}, 5
        with serving(toy) as engine:
            client = send(engine, toy, prompt_of(1, 9))
            client.wait()
        client.check()
        assert client.cached == 0

    def test_an_idle_engine_sleeps(self) -> None:
        toy = ToyEngine(tiers=True)
        toy.tiers.refuse_stores = True
        polled = threading.Event()
        with serving(toy) as engine:
            send(engine, toy, prompt_of(1, 9)).wait()
            toy.tiers.on_call = lambda _: polled.set()
            assert not polled.wait(0.1), "it looks at moves although there are none"
            send(engine, toy, prompt_of(2, 9)).wait()
            assert polled.is_set()

    def test_outstanding_stores_are_looked_at_without_any_request(self) -> None:
        toy = ToyEngine(tiers=True)
        toy.tiers.store_polls = 20
        answered = threading.Event()
        toy.tiers.on_call = lambda method: answered.set() if method == "finish" else None
        with serving(toy) as engine:
            send(engine, toy, prompt_of(1, 8), 1).wait()
            assert answered.wait(WAIT_S)

    def test_forget_takes_effect_before_the_next_request(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            send(engine, toy, prompt_of(1, 9)).wait()
            engine.forget_prefixes()
            client = send(engine, toy, prompt_of(1, 9))
            client.wait()
            assert client.cached == 0


class TestRefusals:
    def test_what_can_never_be_served_is_refused_at_once(self) -> None:
        toy = ToyEngine(4)
        with serving(toy) as engine:
            with pytest.raises(ContextLengthError):
                engine.submit(toy.request(prompt_of(1, 16), 5), lambda _: None)
            with pytest.raises(RequestRefusedError, match="token ids"):
                engine.submit(toy.request([VOCAB], 5), lambda _: None)

    def test_the_queue_is_bounded(self) -> None:
        toy = ToyEngine()
        gate = threading.Event()
        toy.runner.on_step = lambda: assert_set(gate)
        with serving(toy) as engine:
            clients = [send(engine, toy, [seed]) for seed in range(LIMITS.requests_max)]
            with pytest.raises(QueueFullError, match="8 requests"):
                send(engine, toy, [1])
            gate.set()
            for client in clients:
                client.wait()
            send(engine, toy, [1]).wait()

    def test_an_id_is_used_once_at_a_time(self) -> None:
        toy = ToyEngine()
        gate = threading.Event()
        toy.runner.on_step = lambda: assert_set(gate)
        with serving(toy) as engine:
            client = send(engine, toy, [1])
            with pytest.raises(RequestRefusedError, match="in use"):
                engine.submit(client.request, lambda _: None)
            gate.set()
            client.wait()
            again = Client(client.request)
            engine.submit(again.request, again.take)
            again.wait()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


class TestAborts:
    @pytest.mark.parametrize("state", ["running", "waiting", "loading"])
    def test_b95_an_abort_frees_everything_at_once(self, state: str) -> None:
        config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
        toy = ToyEngine(2048, tiers=True, config=config)
        toy.run(prompt_of(1, 9), 1)
        toy.core.forget_prefixes()
        toy.tiers.load_polls = 10 if state == "loading" else 0
        with serving(toy) as engine:
            if state == "waiting":
                ahead = send(engine, toy, prompt_of(2, 9), 4000)
                assert ahead.first.wait(WAIT_S)
            client = send(engine, toy, prompt_of(1, 9), 4000)
            if state == "running":
                assert client.first.wait(WAIT_S)
            engine.abort(client.request.request_id)
            client.wait()
            stats = engine.stats()
            assert client.finish_reason is FinishReason.ABORT
            assert stats.loading == stats.waiting == 0
            assert stats.running == (1 if state == "waiting" else 0)
            if state == "waiting":
                engine.abort(ahead.request.request_id)
                ahead.wait()

    def test_unknown_and_ended_ids_are_ignored(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            client = send(engine, toy, [1])
            client.wait()
            engine.abort(client.request.request_id)
            engine.abort("nobody")
            send(engine, toy, [2]).wait()


class TestFailures:
    def test_a_failed_step_fails_its_requests_and_no_other(self) -> None:
        toy = ToyEngine(config=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
        toy.runner.failure = RuntimeError("device lost")
        with serving(toy) as engine:
            failed, waiting = send(engine, toy, [1]), send(engine, toy, [2])
            failed.wait()
            waiting.wait()
            assert engine.stats().step_errors == 1
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.deltas[-1].error == "RuntimeError: device lost"
        waiting.check()

    def test_a_half_written_step_leaves_nothing_to_be_found(self) -> None:
        toy = ToyEngine()
        toy.runner.failure = RuntimeError("device lost")
        answer = toy.submit(prompt_of(1, 9))
        toy.finish()
        assert answer.finish_reason is FinishReason.ERROR
        assert toy.pool.indexed == 0
        assert toy.run(prompt_of(1, 9)).cached == 0

    def test_a_request_that_the_runner_refuses_fails_alone(self) -> None:
        toy = ToyEngine()
        toy.runner.refused.add((1,))
        with serving(toy) as engine:
            refused, served = send(engine, toy, [1]), send(engine, toy, [2])
            refused.wait()
            served.wait()
        assert refused.deltas[-1].error == "ConfigError: refused"
        served.check()

    def test_a_callback_that_raises_ends_its_own_request(self) -> None:
        toy = ToyEngine()
        calls: list[Delta] = []

        def broken(delta: Delta) -> None:
            calls.append(delta)
            raise RuntimeError("client gone")

        with serving(toy) as engine:
            engine.submit(toy.request([1], 100), broken)
            client = send(engine, toy, [2], 8)
            client.wait()
        client.check()
        assert [delta.finish_reason for delta in calls] == [None, FinishReason.ABORT]

    def test_an_engine_whose_books_are_wrong_answers_nobody(self) -> None:
        toy = ToyEngine()
        toy.pool.allocate(1)
        engine = Engine(toy.core, LIMITS, SystemClock())
        engine.start()
        engine.stop(0.0)
        assert "references" in engine.stats().error
        with pytest.raises(EngineStoppedError, match="references"):
            send(engine, toy, [1])

    def test_a_bug_in_the_core_answers_everyone(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            gate = threading.Event()
            toy.runner.on_step = lambda: assert_set(gate)
            clients = [send(engine, toy, [seed]) for seed in range(3)]
            toy.core.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
            gate.set()
            for client in clients:
                client.wait()
            assert "ZeroDivisionError" in engine.stats().error
        ended = [client.finish_reason for client in clients]
        assert FinishReason.ERROR in ended
        with pytest.raises(EngineStoppedError):
            send(engine, toy, [1])


class TestStop:
    def test_stop_lets_requests_end(self) -> None:
        toy = ToyEngine()
        engine = Engine(toy.core, LIMITS, SystemClock())
        engine.start()
        client = send(engine, toy, [1], 50)
        assert engine.stop(WAIT_S)
        client.check()
        with pytest.raises(EngineStoppedError, match="stopping"):
            send(engine, toy, [1])

    def test_stop_aborts_what_takes_too_long(self) -> None:
        toy = ToyEngine(1024)
        engine = Engine(toy.core, LIMITS, SystemClock())
        engine.start()
        client = send(engine, toy, [1], 4000)
        assert client.first.wait(WAIT_S)
        assert not engine.stop(0.0)
        assert client.finish_reason is FinishReason.ABORT
        toy.check_idle()

    def test_stop_waits_for_moves(self) -> None:
        toy = ToyEngine(tiers=True)
        toy.tiers.store_polls = 10
        engine = Engine(toy.core, LIMITS, SystemClock())
        engine.start()
        send(engine, toy, prompt_of(1, 8), 1).wait()
        assert engine.stop(WAIT_S)
        assert len(toy.tiers.chunks) == 2
        toy.check_idle()

    def test_an_engine_that_never_started_stops(self) -> None:
        assert Engine(ToyEngine().core, LIMITS, SystemClock()).stop(0.0)


class TestGenerate:
    async def test_deltas_come_as_they_are_made(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            answer = Answer(toy.request(prompt_of(1, 9)))
            async for delta in engine.generate(answer.request):
                answer.take(delta)
        answer.check()

    async def test_many_at_once(self) -> None:
        toy = ToyEngine(tiers=True)
        answers = [Answer(toy.request(prompt_of(seed % 3, 9))) for seed in range(8)]

        async def read(answer: Answer) -> None:
            async for delta in engine.generate(answer.request):
                answer.take(delta)

        with serving(toy) as engine:
            await asyncio.gather(*(read(answer) for answer in answers))
        for answer in answers:
            answer.check()

    async def test_b95_closing_the_iterator_aborts(self) -> None:
        toy = ToyEngine(1024)
        with serving(toy) as engine:
            deltas = engine.generate(toy.request([1], 4000))
            await anext(deltas)
            await deltas.aclose()
            client = send(engine, toy, [2])
            await asyncio.to_thread(client.wait)
            assert engine.stats().running == 0
            assert engine.stats().finished[FinishReason.ABORT] == 1

    async def test_b95_cancelling_the_reader_aborts(self) -> None:
        toy = ToyEngine(1024)
        started = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate(toy.request([1], 4000)):
                started.set()

        with serving(toy) as engine:
            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            client = send(engine, toy, [2])
            await asyncio.to_thread(client.wait)
            assert engine.stats().finished[FinishReason.ABORT] == 1

    async def test_a_slow_reader_loses_nothing(self) -> None:
        toy = ToyEngine()
        with serving(toy) as engine:
            request = toy.request([1], 30)
            deltas = engine.generate(request)
            first = await anext(deltas)
            client = send(engine, toy, [2], 60)
            await asyncio.to_thread(client.wait)
            read = [first, *[delta async for delta in deltas]]
        assert [token for delta in read for token in delta.token_ids] == reference([1], 30)
        assert len(read) < 30, "what it missed was merged"
        assert read[-1].finish_reason is FinishReason.LENGTH

    async def test_a_refusal_is_raised_at_the_first_step(self) -> None:
        toy = ToyEngine(2)
        with serving(toy) as engine, pytest.raises(ContextLengthError):
            await anext(engine.generate(toy.request(prompt_of(1, 9))))

    def test_a_closed_loop_refuses_deltas(self) -> None:
        loop = asyncio.new_event_loop()
        stream = DeltaStream(loop)
        loop.close()
        with pytest.raises(RuntimeError, match="closed"):
            stream.put(Delta("", (), (), Usage(1, 0)))

    def test_two_deltas_are_one(self) -> None:
        first = Delta("a", (1,), (), Usage(1, 1), prompt_logprobs=(None,))
        second = Delta("b", (2,), (), Usage(1, 2), FinishReason.STOP)
        assert merged(first, second) == Delta(
            "ab", (1, 2), (), Usage(1, 2), FinishReason.STOP, prompt_logprobs=(None,)
        )
