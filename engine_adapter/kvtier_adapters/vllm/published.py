"""KV events as the classes of the vLLM that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.types import Tier
from kvtier_adapters.vllm.events import BlockEvent, BlocksLeft


def published(
    event: BlockEvent,
    block_tokens: int,
    media: Mapping[Tier, str],
    group: int = 0,
    window: int = 0,
) -> Any:
    """Return vLLM's event for one KV group; fields that its version has not are left out.

    ``media`` are that version's words for the tiers. ``window`` counts as vLLM does, 0: none.
    """
    tier = event.tier
    place = {
        "medium": media[tier],
        "locality": "REMOTE" if tier is Tier.REMOTE else "LOCAL",
        "ownership": tier.value,
        "group_idx": group,
    }
    hashes = [maybe_convert_block_hash(each) for each in event.hashes]
    if isinstance(event, BlocksLeft):
        return _made(BlockRemoved, block_hashes=hashes, **place)
    lora_id, lora_name = event.lora or (None, None)
    return _made(
        BlockStored,
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(event.parent) if event.parent else None,
        token_ids=list(event.tokens),
        block_size=block_tokens,
        lora_id=lora_id,
        lora_name=lora_name,
        **place,
        kv_cache_spec_kind="sliding_window" if window else "full_attention",
        kv_cache_spec_sliding_window=window or None,
    )


def _made(kind: Any, **values: Any) -> Any:
    return kind(**{name: value for name, value in values.items() if name in kind.__struct_fields__})
