"""Attention over a paged KV pool with plain torch, on any device.

One step holds rows of ragged lengths: chunks of prompts with any history before them, and single
decode tokens. What depends on positions and block tables only is worked out once per step
(``plan_attention``) and used by all layers.

Per row, with ``n`` new tokens after ``start`` tokens of history::

    keys      0 ........ start ....... start + n
              |- history -|- new (causal) -|

A decode row (``n == 1``) sees all its keys: no mask, and the query heads that share a KV head
become the rows of one small product. A prompt chunk is split at ``start``: its history is dense
(again without a mask), its new part is causal, and the two are merged by their log-sum-exp
(Rabe and Staats, 2021). So no mask is ever materialised, and nothing above the diagonal costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvtier_engine.kv_pool import KVPool
from kvtier_engine.types import RowStep


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of a step: its place among the step's tokens and its keys in the pool.

    Tokens ``token_start .. token_start + count`` of the step belong to it; ``history`` tokens
    precede them. The keys lie at slots ``first_slot ..`` when the blocks are consecutive, else
    ``blocks`` lists them.
    """

    token_start: int
    count: int
    history: int
    first_slot: int
    blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer needs to know of a step. ``slots[i]``: where token ``i``'s KV goes."""

    rows: tuple[RowPlan, ...]
    slots: torch.Tensor
    block_tokens: int


def plan_attention(rows: Sequence[RowStep], pool: KVPool) -> AttentionPlan:
    """Work out a step's attention.

    The caller guarantees that each row's table covers its tokens, that no block beyond history is
    shared with another row, and that history is in the pool.
    """
    plans: list[RowPlan] = []
    slots: list[int] = []
    token_start = 0
    size = pool.block_tokens
    for row in rows:
        count = len(row.token_ids)
        end = row.start + count
        used = row.block_ids[0][: -(-end // size)]
        assert count > 0, f"row {row.row}: no tokens"
        assert len(used) * size >= end, f"row {row.row}: {len(used)} blocks for {end} tokens"
        first_slot, blocks = used[0] * size, None
        if used == tuple(range(used[0], used[0] + len(used))):
            slots.extend(range(first_slot + row.start, first_slot + end))
        else:
            blocks = torch.tensor(used, device=pool.device)
            slots.extend(used[at // size] * size + at % size for at in range(row.start, end))
        plans.append(RowPlan(token_start, count, row.start, first_slot, blocks))
        token_start += count
    return AttentionPlan(tuple(plans), torch.tensor(slots, device=pool.device), size)


def write_kv(layer: torch.Tensor, keys_values: torch.Tensor, plan: AttentionPlan) -> None:
    """Store the step's new KV in one layer of the pool.

    ``layer [2, kv_heads, slots, dim]``; ``keys_values [tokens, 2 * kv_heads, dim]``, K heads
    first.
    """
    layer.flatten(0, 1).index_copy_(1, plan.slots, keys_values.transpose(0, 1))


def attend(
    layer: torch.Tensor, queries: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Return attention of ``queries [tokens, heads, dim]`` over one layer, in the same shape.

    The step's own KV must have been written. Query heads ``g * i .. g * (i + 1)`` share KV head
    ``i``.
    """
    kv_heads = layer.shape[1]
    tokens, heads, dim = queries.shape
    grouped = queries.view(tokens, kv_heads, heads // kv_heads, dim)
    output = torch.empty_like(grouped)
    for row in plan.rows:
        span = slice(row.token_start, row.token_start + row.count)
        keys, values = _row_kv(layer, row, plan.block_tokens)
        if row.count == 1:
            # [1, kv_heads, group, dim]: the group takes the place of the query length.
            output[span] = functional.scaled_dot_product_attention(
                grouped[span], keys[None], values[None], scale=scale
            )
        else:
            output[span] = _attend_chunk(grouped[span], keys, values, row.history, scale)
    return output.view(tokens, heads, dim)


def _row_kv(
    layer: torch.Tensor, row: RowPlan, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's K and V, each ``[kv_heads, history + count, dim]``: views where possible."""
    end = row.history + row.count
    if row.blocks is None:
        span = layer[:, :, row.first_slot : row.first_slot + end]
    else:
        paged = layer.view(2, layer.shape[1], -1, block_tokens, layer.shape[3])
        span = paged.index_select(2, row.blocks).flatten(2, 3)[:, :, :end]
    return span[0], span[1]


def _attend_chunk(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, history: int, scale: float
) -> torch.Tensor:
    """Return causal attention of a chunk ``[count, kv_heads, group, dim]`` after its history."""
    # KV heads take the place of the batch, so that one K and V serve their group of query heads
    # by a stride of zero.
    shape = (-1, queries.shape[2], -1, -1)
    by_head = queries.permute(1, 2, 0, 3)
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    if history == 0:
        mixed = functional.scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=scale
        )
    elif queries.device.type == "cpu":
        mixed = _merge_history(by_head, keys, values, history, scale)
    else:
        # Costs seconds to import, and no CPU needs it.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(queries.shape[0], keys.shape[2])
        mixed = functional.scaled_dot_product_attention(by_head, keys, values, mask, scale=scale)
    return mixed.permute(2, 0, 1, 3)


def _merge_history(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, history: int, scale: float
) -> torch.Tensor:
    """Return attention over history (dense) and over the chunk itself (causal), merged."""
    # The only one of torch's CPU operators that also returns the log-sum-exp.
    partial = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    old, old_weight = partial(
        queries, keys[:, :, :history], values[:, :, :history], 0.0, False, scale=scale
    )
    new, new_weight = partial(
        queries, keys[:, :, history:], values[:, :, history:], 0.0, True, scale=scale
    )
    share = torch.sigmoid(old_weight - new_weight).unsqueeze(-1)
    return torch.lerp(new, old, share.to(new.dtype))
