"""The bundled engine with the bundled model and a cache of its own, stepped by the bench."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.worker import CacheWorker
from kvtier.cache.worth.costs import Choice
from kvtier.clock import SystemClock
from kvtier.types import Namespace, Placement
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.cache_link import CacheLink
from kvtier_engine.core import EngineCore
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.link import Link, NoLink
from kvtier_engine.runner import ModelRunner
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.types import Delta, GenerateRequest, SamplingParams, Usage
from kvtier_engine.weights.load import LoadedModel, kv_layout

BLOCK_TOKENS = 16
#: As the engine's own thread looks at moves that nothing else waits for.
POLL_S = 0.001


class AlwaysLoad(CacheLink):
    """Loads all that there is, and waits for it to the end."""

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool
    ) -> Choice | None:
        """Decide nothing."""
        del match, start_token, end_token, split
        return None


@dataclass
class Asked:
    """A request under way: what came, and when."""

    began_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    usage: Usage | None = None
    done: bool = False

    def take(self, delta: Delta) -> None:
        """Note a delta."""
        if not self.tokens:
            self.first_s = time.perf_counter() - self.began_s
        self.tokens += delta.token_ids
        self.usage, self.done = delta.usage, delta.finish_reason is not None


class Rig:
    """One engine. Three ways to answer share model, pool and cache: ``cores`` by name.

    ``cost``: through the cache, by what it costs; ``load``: whatever is held is loaded;
    ``compute``: without tiers.
    """

    def __init__(self, model: LoadedModel, cache: Cache, *, tokens: int, rows: int = 4) -> None:
        """The pool holds ``tokens`` tokens. The cache stays the caller's."""
        layout = kv_layout(model.config, model.dtype)
        token_bytes = 2 * model.config.layer_count * model.config.kv_heads * model.config.head_dim
        self.pool = KVPool(
            layout, block_tokens=BLOCK_TOKENS, capacity_bytes=tokens * token_bytes * 4
        )
        runner = ModelRunner(model, self.pool, max_rows=rows)
        tried = runner.warm_up()
        self.namespace = Namespace(model.weights_id, layout, rope=model.rope_text)
        self.cache = cache
        self._worker = CacheWorker(Placement(), cache.arena, codecs=cache.codecs)
        self._worker.register_pool(self.pool)
        self._ids = itertools.count()

        def core(link: Callable[[BlockPool], Link]) -> EngineCore:
            blocks = BlockPool(self.pool.block_count, BLOCK_TOKENS)
            return EngineCore(
                runner,
                blocks,
                link(blocks),
                config=SchedulerConfig(rows, 512),
                detokenizer=model.tokenizer.detokenizer,
                end_ids=frozenset(),
                clock=SystemClock(),
            )

        wired = (cache, self._worker, self.namespace)
        self.cores = {
            "cost": core(lambda blocks: CacheLink(*wired, blocks)),
            "load": core(lambda blocks: AlwaysLoad(*wired, blocks)),
            "compute": core(lambda _: NoLink()),
        }
        cache.costs.serve(f"{model.weights_id} bench", *tried)

    def submit(self, way: str, prompt: Sequence[int], new_tokens: int) -> Asked:
        """Put a request in."""
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        asked = Asked(time.perf_counter())
        name = f"r{next(self._ids)}"
        request = GenerateRequest(name, tuple(prompt), sampling, explain=True)
        self.cores[way].submit(request, asked.take)
        return asked

    def run(self, way: str) -> list[float]:
        """Step until nothing is left to do or to wait for; return what the steps took."""
        core = self.cores[way]
        steps = []
        while core.busy:
            began = time.perf_counter()
            if core.step():
                steps.append(time.perf_counter() - began)
            else:
                time.sleep(POLL_S)
        return steps

    def answer(self, way: str, prompt: Sequence[int], new_tokens: int = 1) -> Asked:
        """Answer one request alone, with nothing in HBM."""
        self.cores[way].forget_prefixes()
        asked = self.submit(way, prompt, new_tokens)
        self.run(way)
        return asked

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
