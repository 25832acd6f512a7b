"""The smallest engine that embeds a cache: a pool, a worker, and KV made up from the tokens.

It shows the order of the calls, and it checks what a real engine cannot: whether every value that
came from a tier is the one that computing would have given.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from typing import TYPE_CHECKING, Final

from kvtier.cache.cache import Cache
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.testing.pools import TorchPool
from kvtier.types import Blocks, GroupKind, KVGroup, KVLayout, Namespace, Part, Placement

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS: Final = 16
_GROUP: Final = KVGroup(
    GroupKind.FULL, layers=(0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="float32"
)
_PLANES: Final = [(layer, part) for layer in _GROUP.layers for part in Part]
_POLL_S: Final = 0.0005


class ToyEngine:
    """Serves one request at a time and waits for each move. One thread only.

    ``cache`` stays the caller's: close the engine first, then the cache. Requests have at most
    ``capacity_tokens`` tokens.
    """

    def __init__(self, cache: Cache, *, tenant: str = "", capacity_tokens: int = 4096) -> None:
        """Put a pool and a worker beside the cache."""
        self._cache = cache
        self._namespace = Namespace("toy weights", KVLayout((_GROUP,)), tenant_salt=tenant)
        self._clock = SystemClock()
        self._pool = TorchPool(
            [_GROUP], block_count=capacity_tokens // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS
        )
        self._worker = CacheWorker(Placement(), cache.arena)
        self._worker.register_pool(self._pool)

    def prefill(self, tokens: TokenSequence[int]) -> dict[str, int]:
        """Bring a prompt's KV into the pool; say how many tokens each tier gave.

        What no tier gave is computed (``"computed"``) and stored. Raises ``AssertionError`` if a
        tier gave a wrong value.
        """
        self._pool.poison()
        sequence = self._cache.sequence(self._namespace)
        sequence.append(tokens)
        given = self._load(self._match(sequence))
        loaded = sum(given.values())
        self._check(tokens, loaded)
        self._compute(tokens, loaded)
        self._store(sequence)
        return {**given, "computed": len(tokens) - loaded}

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _match(self, sequence: Sequence) -> Ready:
        while isinstance(match := self._cache.match(sequence), Pending):
            self._clock.sleep(_POLL_S)
        return match

    def _load(self, match: Ready) -> dict[str, int]:
        load = self._cache.begin_load(match, self._blocks(match.tokens)) if match.hits else None
        if load is None:
            return {}
        while load.outcome is None:
            for plan in load.poll():
                self._worker.execute(plan)
            self._finish()
        return {tier.value: count for tier, count in load.outcome.tokens_by_tier.items()}

    def _store(self, sequence: Sequence) -> None:
        chunks = range(len(sequence.chunk_keys))
        blocks = self._blocks(len(chunks) * sequence.chunk_tokens)
        plan = self._cache.begin_store(sequence, chunks, blocks)
        if plan is None:
            return
        self._worker.execute(plan)
        while not self._cache.store_done(plan.plan_id):
            self._finish()

    def _finish(self) -> None:
        self._cache.finish(self._worker.poll())
        self._clock.sleep(_POLL_S)

    def _blocks(self, tokens: int) -> Blocks:
        """The pool's first blocks: this engine has one request, so no table is needed."""
        return Blocks(0, (tuple(range(tokens // BLOCK_TOKENS)),), BLOCK_TOKENS)

    def _compute(self, tokens: TokenSequence[int], start: int) -> None:
        """Write the KV of tokens from ``start`` on into the pool."""
        for layer, part in _PLANES:
            view = self._pool.layer_view(0, layer, part)
            values = self._values(tokens, layer, part)
            for position in range(start, len(tokens)):
                block, offset = divmod(position, BLOCK_TOKENS)
                view[block, offset] = values[position]

    def _check(self, tokens: TokenSequence[int], loaded: int) -> None:
        """Compare the KV of the first tokens in the pool with what computing would have given."""
        import torch

        blocks = range(loaded // BLOCK_TOKENS)
        for layer, part in _PLANES if blocks else ():
            rows = self._pool.rows(0, layer, part, blocks)
            expected = self._values(tokens, layer, part)[:loaded, None, None].expand_as(rows)
            if not torch.equal(rows, expected):
                raise AssertionError(f"a tier gave wrong values of layer {layer}")

    def _values(self, tokens: TokenSequence[int], layer: int, part: Part) -> torch.Tensor:
        """One value per token that depends on all tokens before it, as KV does."""
        import torch

        state, values = layer * 2 + part, []
        for token in tokens:
            state = (state * 31 + token + 1) % 65_521
            values.append(float(state))
        return torch.tensor(values)
