"""vLLM's requests as the cache sees them: namespace, hints, tokens that are known and computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worth.costs import Choice
from kvtier.constants import PIN_S_MAX, TTL_S_MAX
from kvtier.types import Features, Hint, Namespace
from kvtier_adapters.vllm.identity import adapter_id, inputs_id

#: The part of ``kv_transfer_params`` that is for KVTier.
HINTS_KEY: Final = "kvtier"


@dataclass(slots=True)
class Followed:
    """A request as the cache knows it: ``tables`` are its blocks, by group, as they were allocated.

    ``found`` are vLLM's own tokens of it; ``stored_chunks`` counts up to the last chunk that the
    cache took out of the blocks, ``lost_chunks`` up to the last one of which blocks are gone.
    ``epoch`` is the engine's root, of no tenant and no adapter, from before the request was first
    seen.
    """

    request: Any
    sequence: Sequence
    tables: list[list[int]] = field(default_factory=list)
    match: Ready | None = None
    choice: Choice | None = None
    found: int = 0
    admitted: bool = False
    #: Tokens that are in the blocks once every step so far is done; 0 while it has no such step.
    settled: int = 0
    #: A load came short: what is there after that is computed, and asked for no more.
    disappointed: bool = False
    stored_chunks: int = 0
    offered_chunks: int = 0
    lost_chunks: int = 0
    #: Chunks whose names in KV events are known.
    named_chunks: int = 0
    epoch: bytes = b""

    @property
    def computed(self) -> int:
        """How many first tokens are known and in the blocks when the next orders are carried out.

        What vLLM calls computed is more: tokens that are still being loaded, and those that it
        found in blocks which another request fills in this very step. Drafts that were rejected
        are in it no longer.
        """
        request = self.request
        return min(self.settled, int(request.num_computed_tokens), int(request.num_tokens))

    def append_known(self) -> None:
        """Hash the tokens that have become known."""
        sequence = self.sequence
        if sequence.token_count < self.request.num_tokens:
            sequence.append(list(self.request.all_token_ids[sequence.token_count :]))


def uses_cache(request: Any) -> bool:
    """Tell whether a request's tokens say all of what its KV follows from.

    Embeddings in place of tokens do not, nor does input that is still to come and may replace some.
    """
    return request.prompt_embeds is None and not getattr(request, "resumable", False)


def reads_cache(request: Any) -> bool:
    """Tell whether a request may go on from KV that others have computed."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def request_namespace(base: Namespace, request: Any) -> Namespace:
    """Return the namespace of a request's KV: its salt, adapter and inputs that are no tokens."""
    lora = request.lora_request
    inputs = inputs_id(
        [
            (str(each.identifier), int(each.mm_position.offset), int(each.mm_position.length))
            for each in request.mm_features or ()
        ]
    )
    adapter = adapter_id(str(lora.lora_name), str(lora.lora_path)) if lora else ""
    return replace(
        base,
        adapter_id=" ".join(part for part in (adapter, inputs) if part),
        tenant_salt=request.cache_salt or "",
    )


def request_features(params: Mapping[str, Any] | None) -> tuple[Features, str]:
    """Return a request's hints, and what is wrong with them: then they are as if not given.

    They stand in ``kv_transfer_params`` under ``kvtier``: ``hint``, ``turn``, ``ttl_s``, ``pin_s``.
    """
    hints = (params or {}).get(HINTS_KEY)
    if hints is None:
        return Features(), ""
    if not isinstance(hints, Mapping):
        return Features(), f"{hints!r} is no object"
    unknown = sorted(set(hints) - {"hint", "turn", "ttl_s", "pin_s"})
    if unknown:
        return Features(), f"no hint {unknown[0]!r}; known: hint, turn, ttl_s, pin_s"
    turn, hint = hints.get("turn", 1), hints.get("hint", Hint.NONE)
    if type(turn) is not int or turn < 1:
        return Features(), f"turn = {turn!r}: allowed is a whole number from 1"
    if hint not in tuple(Hint):
        return Features(), f"hint = {hint!r}: allowed are {', '.join(Hint)}"
    times = {}
    for name, seconds_max in (("ttl_s", TTL_S_MAX), ("pin_s", PIN_S_MAX)):
        seconds = hints.get(name, 0.0)
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not math.isfinite(seconds) or not 0 <= seconds <= seconds_max:
            return Features(), f"{name} = {seconds!r}: allowed is 0 to {seconds_max:g}"
        times[name] = float(seconds)
    return Features(turn, Hint(hint), **times), ""
