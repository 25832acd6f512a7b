"""The toy model behind the real scheduler: one engine per test, stepped by hand."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.interfaces import Clock
from kvtier.keys import extend_chain
from kvtier.testing.clock import FakeClock
from kvtier.testing.pools import TorchPool
from kvtier.types import Namespace
from kvtier_engine.block_pool import BlockDigest, BlockPool
from kvtier_engine.cache_link import CacheLink
from kvtier_engine.core import EngineCore, tell_nobody
from kvtier_engine.link import CacheFront, Link, NoLink, PlanWorker
from kvtier_engine.request import Request
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from tests.lib.scripted_tiers import ScriptedTiers
from tests.lib.toy_model import ToyRunner, reference, toy_layout, toy_pool

BLOCK = 4
STEPS_MAX = 2000
#: Seconds after which a wait for the engine's thread is taken for a hang.
WAIT_S = 20.0


class ToyDetokenizer:
    """One letter per token."""

    def push(self, token_id: int, /) -> str:
        return chr(97 + token_id % 26)

    def finish(self) -> str:
        return ""


@dataclass(eq=False)
class Answer:
    """What a client has received."""

    request: GenerateRequest
    deltas: list[Delta] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        assert not self.done, "a delta after the last one"
        self.deltas.append(delta)

    @property
    def done(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        return tuple(value for delta in self.deltas for value in delta.prompt_logprobs)

    @property
    def usage(self) -> Usage:
        return self.deltas[-1].usage

    @property
    def cached(self) -> int:
        return self.usage.cached_tokens

    def check(self) -> None:
        """Equal to the same prompt computed alone."""
        assert self.done, f"{self.request.request_id} has not ended"
        expected = reference(self.request.prompt, self.request.sampling.max_tokens)
        assert self.finish_reason is FinishReason.LENGTH, self.deltas[-1]
        assert self.tokens == expected, self.request.request_id


class Client(Answer):
    """An answer that another thread can wait for."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self.first = threading.Event()
        self.last = threading.Event()

    def take(self, delta: Delta) -> None:
        super().take(delta)
        self.first.set()
        if self.done:
            self.last.set()

    def wait(self) -> None:
        assert self.last.wait(WAIT_S), f"{self.request.request_id} has not ended"


class ToyEngine:
    """An ``EngineCore`` over the toy, with scripted tiers, with a cache of the test's, or without.

    After each step the books are checked. A cache and its engine live by one ``clock``.
    """

    def __init__(
        self,
        blocks: int = 64,
        *,
        tiers: bool = False,
        chunk_tokens: int = BLOCK,
        config: SchedulerConfig | None = None,
        digest: BlockDigest = extend_chain,
        end_ids: frozenset[int] = frozenset(),
        cache: tuple[CacheFront, PlanWorker] | None = None,
        memory: TorchPool | None = None,
        clock: Clock | None = None,
        on_admitted: Callable[[Request], None] = tell_nobody,
    ) -> None:
        self.memory = memory or toy_pool(blocks, BLOCK)
        self.runner = ToyRunner(self.memory)
        self.pool = BlockPool(blocks, BLOCK, digest=digest)
        self.tiers = ScriptedTiers(self.memory)
        self.namespace = Namespace("toy", toy_layout(chunk_tokens))
        self.link: Link = NoLink()
        if tiers or cache is not None:
            front, worker = cache or (self.tiers, self.tiers)
            self.link = CacheLink(front, worker, self.namespace, self.pool)
        self.clock = FakeClock()
        self.core = EngineCore(
            self.runner,
            self.pool,
            self.link,
            config=config or SchedulerConfig(),
            detokenizer=ToyDetokenizer,
            end_ids=end_ids,
            clock=clock or self.clock,
            on_admitted=on_admitted,
        )
        self._ids = itertools.count()

    def request(
        self, prompt: Sequence[int], max_tokens: int = 5, *, salt: str = "", priority: int = 0
    ) -> GenerateRequest:
        """A greedy request that ends by length."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        return GenerateRequest(f"r{next(self._ids)}", tuple(prompt), sampling, salt, priority)

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 5, *, salt: str = "", priority: int = 0
    ) -> Answer:
        """Put a request in; its answer fills as the engine is stepped."""
        return self.send(self.request(prompt, max_tokens, salt=salt, priority=priority))

    def send(self, request: GenerateRequest) -> Answer:
        """Put in a request of any kind."""
        answer = Answer(request)
        self.core.submit(request, answer.take)
        return answer

    def step(self, count: int = 1) -> None:
        """Step, with the books checked after each."""
        for _ in range(count):
            self.core.step()
            self.core.check_integrity()

    def finish(self, steps_max: int = STEPS_MAX) -> int:
        """Step until nothing is left to do or to wait for; return how many steps that took."""
        for steps in range(steps_max):
            if not self.core.busy:
                self.check_idle()
                return steps
            self.step()
        raise AssertionError(f"still busy after {steps_max} steps")

    def run(self, prompt: Sequence[int], max_tokens: int = 5, *, salt: str = "") -> Answer:
        """Serve one request alone, to its end, and compare it with the reference."""
        answer = self.submit(prompt, max_tokens, salt=salt)
        self.finish()
        answer.check()
        return answer

    def lose_hbm(self) -> None:
        """Lose everything in HBM, as other traffic would do it in time."""
        self.core.forget_prefixes()
        self.memory.poison()

    def check_idle(self) -> None:
        """Nothing held, nothing leaked: all blocks are free or can be found."""
        self.core.check_integrity()
        assert self.pool.available == self.pool.block_count
        assert self.runner.rows == {}
        assert self.link.faults == self.tiers.raised, (
            "a fault of the cache that the test did not ask for"
        )


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that shares no block with those of other seeds."""
    return [(seed * 31 + i * 7 + seed * i) % 89 for i in range(length - 1)] + [seed % 97]
