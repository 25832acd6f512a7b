"""A sequence's KV in the pools of an engine's ranks, stored chunk by chunk; and its mean K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cache.planner import chunk_shape, shard_writers, store_moves
from kvtier.codecs.calibration import Rotary
from kvtier.codecs.raw import RawCodec
from kvtier.layout import head_range
from kvtier.testing.pools import TorchPool
from kvtier.types import Blocks, GroupKind, KVGroup, KVLayout, Move, Part, Placement, Slot

SINKS = 4
BLOCK_TOKENS = 2


@dataclass(frozen=True)
class Traffic:
    """``k`` is float64 ``[layers, tokens, kv_heads, dim]``, as the pools hold it after RoPE."""

    layout: KVLayout
    k: npt.NDArray[np.float64]
    ranks: tuple[tuple[Placement, TorchPool], ...]

    @property
    def chunks(self) -> int:
        return int(self.k.shape[1]) // self.layout.chunk_tokens

    def moves(self, chunk: int) -> Iterator[tuple[TorchPool, Move]]:
        """The store of one chunk, by all ranks."""
        shape = chunk_shape(self.layout, RawCodec(), chunk=chunk)
        workers = [placement for placement, _ in self.ranks]
        ids = tuple(reversed(range(self.k.shape[1] // BLOCK_TOKENS)))
        for move in store_moves(
            self.layout,
            shape,
            shard_writers(self.layout, shape, workers),
            chunk=chunk,
            blocks=Blocks(0, (ids,), BLOCK_TOKENS),
            slots=lambda shard: Slot(0, shape.sizes[shard]),
        ):
            yield self.ranks[move.worker][1], move

    def mean_k(self, rotary: Rotary, tokens: int) -> npt.NDArray[np.float64]:
        """The mean of K before RoPE of the first ``tokens``, sinks left out: in two passes."""
        rows = [turned_back(self.k[:, token], rotary, token) for token in range(SINKS, tokens)]
        mean: npt.NDArray[np.float64] = np.mean(rows, axis=0)
        return mean


def turned_back(
    k: npt.NDArray[np.float64], rotary: Rotary, position: int
) -> npt.NDArray[np.float64]:
    """K ``[..., dim]`` of one position before RoPE, pair by pair as complex numbers."""
    found = k.copy()
    half = len(rotary.inverse_frequencies)
    for pair, frequency in enumerate(rotary.inverse_frequencies):
        first, second = pair, pair + half
        if rotary.interleaved:
            first, second = 2 * pair, 2 * pair + 1
        first, second = first + rotary.start, second + rotary.start
        angle = np.float32(position) * np.float32(frequency)
        turned = (k[..., first] + 1j * k[..., second]) * np.exp(-1j * float(angle))
        found[..., first] = turned.real / rotary.scaling
        found[..., second] = turned.imag / rotary.scaling
    return found


def traffic(
    *,
    layers: int = 3,
    kv_heads: int = 2,
    dim: int = 8,
    chunk_tokens: int = 4,
    chunks: int = 5,
    dtype: str = "float32",
    tp_size: int = 1,
    stages: int = 1,
    seed: int = 1,
    device: str = "cpu",
) -> Traffic:
    """Random K with a mean, in pools of ``tp_size`` x ``stages`` ranks."""
    group = KVGroup(GroupKind.FULL, tuple(range(layers)), kv_heads, dim, dim, dtype)
    starts = tuple(range(stages))
    layout = KVLayout((group,), chunk_tokens, tp_size, starts, section_layers=2)
    generator = np.random.default_rng(seed)
    tokens = chunks * chunk_tokens
    values = generator.normal(2.0, 1.0, (layers, tokens, kv_heads, dim))
    k = torch.from_numpy(values).to(getattr(torch, dtype))
    ranks: list[tuple[Placement, TorchPool]] = []
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < stages else layers
        for rank in range(tp_size):
            heads = head_range(kv_heads, rank, tp_size)
            own = KVGroup(GroupKind.FULL, group.layers[start:end], len(heads), dim, dim, dtype)
            pool = TorchPool(
                [own],
                block_count=tokens // BLOCK_TOKENS,
                block_tokens=BLOCK_TOKENS,
                device=device,
            )
            for layer in range(start, end):
                rows = k[layer, :, heads.start : heads.stop]
                # Blocks in the reverse order of their tokens.
                blocks = rows.reshape(-1, BLOCK_TOKENS, len(heads), dim).flip(0)
                pool.layer_view(0, layer - start, Part.K).copy_(blocks)
            ranks.append((Placement(len(ranks), rank, tp_size, stage), pool))
    return Traffic(layout, k.double().numpy(), tuple(ranks))
