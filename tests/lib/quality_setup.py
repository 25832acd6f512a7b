"""Tiny models for quality measurements, and codecs that do a known thing to KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvtier.codecs.raw import RawCodec
from kvtier.errors import CodecError
from kvtier.interfaces import PagedPool
from kvtier.types import Move, Part, ShardLayout
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.quality.measure import PASSES, Bench
from kvtier_engine.quality.results import Mode, Result
from kvtier_engine.quality.windows import Windows
from kvtier_engine.weights.load import LoadedModel, load_model
from tests.lib.tiny_llama import Tensors, tiny_config, tiny_tensors, write_folder

PREFIX_TOKENS = 256
CONTINUATION_TOKENS = 64


class Tiny:
    """A tiny model on disk, loaded, with what its oracle needs."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.config: dict[str, Any] = tiny_config(num_hidden_layers=5, rope_theta=10_000.0)
        self.tensors: Tensors = tiny_tensors(self.config, seed)
        self.folder = write_folder(folder, self.config, self.tensors)
        self.loaded: LoadedModel = load_model(str(self.folder))


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 250, (count,), generator=generator).tolist())


def windows_of(*token_ids: tuple[int, ...]) -> Windows:
    return Windows(PREFIX_TOKENS, CONTINUATION_TOKENS, token_ids)


def measured(
    tiny: Tiny, windows: Windows, mode: Mode, *codecs: RawCodec, passes: int = PASSES
) -> list[Result]:
    bench = Bench(tiny.loaded, windows, mode, passes=passes)
    results, skipped = bench.measure([bench.prepare(codec) for codec in codecs], lambda _: None)
    assert not skipped
    return results


class NoisyCodec(RawCodec):
    """Adds noise of a share of each value's size to what comes back."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        super().unpack(payload, pool, move)
        generator = torch.Generator().manual_seed(move.block_ids[0])
        for view in moved_views(pool, move):
            rows = view[list(move.block_ids)]
            noise = torch.randn(rows.shape, generator=generator)
            view[list(move.block_ids)] = rows * (1 + self._share * noise)


class BendingCodec(RawCodec):
    """Changes each value by a smooth function of it, so that rounding cannot tip it over."""

    @staticmethod
    def bend(rows: torch.Tensor) -> torch.Tensor:
        return rows + 0.1 * torch.sin(3 * rows)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        super().unpack(payload, pool, move)
        for view in moved_views(pool, move):
            view[list(move.block_ids)] = self.bend(view[list(move.block_ids)])


class OtherTextCodec(RawCodec):
    """Gives back the first chunk of another text, which lies in ``other`` from block 0 on."""

    def __init__(self, other: KVPool) -> None:
        super().__init__()
        self._other = other

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        pairs = zip(moved_views(pool, move), moved_views(self._other, move), strict=True)
        for view, found in pairs:
            view[list(move.block_ids)] = found[: len(move.block_ids)]


class ForgetfulCodec(RawCodec):
    """Leaves the last head of what it should write as it was."""

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        kept = [view[:, :, -1].clone() for view in moved_views(pool, move)]
        super().unpack(payload, pool, move)
        for view, old in zip(moved_views(pool, move), kept, strict=True):
            view[:, :, -1] = old


class RecordingCodec(RawCodec):
    """Notes which blocks it packs and unpacks."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[tuple[int, ...]] = []
        self.unpacked: list[tuple[int, ...]] = []

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        super().pack(pool, move, payload)
        self.packed.append(move.block_ids)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        super().unpack(payload, pool, move)
        self.unpacked.append(move.block_ids)


class NarrowCodec(RawCodec):
    """Cannot carry any layout."""

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        raise CodecError("takes dims of 4096 only")


def moved_views(pool: PagedPool, move: Move) -> list[torch.Tensor]:
    views: list[torch.Tensor] = []
    for layer in range(move.layout.layers):
        for part in (Part.K, Part.V):
            view = pool.layer_view(move.shard.group, layer, part)
            assert isinstance(view, torch.Tensor)
            views.append(view)
    return views
