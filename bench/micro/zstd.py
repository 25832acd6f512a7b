"""What the byte codec zstd makes of real KV on one core: ratio, and GB/s against zstd and memcpy.

The KV of SmolLM2-135M over English prose, in the model's own float32 and rounded to bfloat16,
packed into sections as they lie in shards; for comparison as ``int8`` and ``int4-g128`` pack them.
In each turn every section is copied, encoded and decoded by the codec, and by plain zstd of the
same level; figures are GB of the sections' bytes per second of the thread. The gate is that all
bytes come back.

    python bench/micro/zstd.py [--smoke] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.limits import huge_buffer
from kvtier.cache.planner import chunk_shape, shard_writers, store_moves
from kvtier.codecs.zstd import ZstdCodec
from kvtier.registry import codecs
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import (
    DTYPE_BYTES,
    Blocks,
    GroupKind,
    KVGroup,
    KVLayout,
    Part,
    Placement,
    Slot,
)
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.quality.text import read_text
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import kv_layout, load_model

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """Sections of one kind, in memory without gaps."""

    name: str
    value_bytes: int
    sections: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.sections))


@torch.inference_mode()
def computed(tokens: int) -> tuple[KVPool, KVLayout]:
    """The KV of a text's first tokens, in one pool."""
    loaded = load_model("smollm2-135m", device="cpu", dtype="float32")
    _, text = read_text(None)
    ids = torch.tensor(loaded.tokenizer.encode(text)[:tokens])
    layout = kv_layout(loaded.config, loaded.dtype)
    group = layout.groups[0]
    token_bytes = len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim) * 4
    pool = KVPool(layout, block_tokens=BLOCK, capacity_bytes=tokens * token_bytes, device="cpu")
    blocks = (tuple(range(tokens // BLOCK)),)
    plan = plan_attention([RowStep(0, tuple(ids.tolist()), 0, blocks, sample=False)], pool)
    positions = torch.arange(tokens)
    loaded.model.forward(ids, positions, plan, pool, positions[:1])
    return pool, layout


def made_up() -> tuple[KVPool, KVLayout]:
    """Random values in little of a pool: does it run?"""
    group = KVGroup(GroupKind.FULL, (0, 1), kv_heads=1, k_dim=64, v_dim=64, dtype="float32")
    layout = KVLayout((group,), chunk_tokens=32)
    pool = KVPool(layout, block_tokens=BLOCK, capacity_bytes=32 * 1024, device="cpu")
    for layer in range(2):
        pool.layer(layer).normal_(generator=torch.Generator().manual_seed(layer))
    return pool, layout


def cases(pool: KVPool, layout: KVLayout, tokens: int) -> Iterator[Case]:
    for dtype, names in (("bfloat16", ("raw", "int8", "int4-g128")), ("float32", ("raw",))):
        (group,) = (replace(each, dtype=dtype) for each in layout.groups)
        copy = TorchPool([group], block_count=tokens // BLOCK, arrangement=Arrangement.STACKED)
        for layer in range(len(group.layers)):
            for part in Part:
                copy.layer_view(0, layer, part).copy_(pool.layer_view(0, layer, part))
        for name in names:
            width = DTYPE_BYTES[dtype] if name == "raw" else 1
            sections = packed(copy, replace(layout, groups=(group,)), name, tokens)
            yield Case(f"{name} {dtype}", width, sections)


def packed(pool: TorchPool, layout: KVLayout, name: str, tokens: int) -> tuple[memoryview, ...]:
    """Every section of every chunk as a codec packs it."""
    codec = codecs.load(name)()
    blocks = Blocks(0, (tuple(range(tokens // BLOCK)),), BLOCK)
    sections = []
    for chunk in range(tokens // layout.chunk_tokens):
        shape = chunk_shape(layout, codec, chunk=chunk)
        slot = huge_buffer(shape.chunk_bytes)
        writers = shard_writers(layout, shape, (Placement(),))
        moves = store_moves(
            layout, shape, writers, chunk=chunk, blocks=blocks, slots=lambda _: Slot(0, 0)
        )
        for move in moves:
            codec.pack(pool, move, slot[move.payload_offset :])
        (geometry,) = shape.geometries.values()
        for start, nbytes in zip(geometry.section_offsets, geometry.section_bytes, strict=True):
            sections.append(slot[start : start + nbytes])
    return tuple(sections)


class Turn:
    """One case's buffers, and what is done with them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.codec = ZstdCodec()
        largest = max(map(len, case.sections))
        self.room = huge_buffer(len(case.sections) * self.codec.encoded_bytes_max(largest))
        self.target = huge_buffer(largest)
        self.encoded: list[memoryview] = []
        self.frames: list[bytes] = []
        self.plain = zstandard.ZstdCompressor(level=1)
        self.unplain = zstandard.ZstdDecompressor()

    def copy(self) -> None:
        for section in self.case.sections:
            np.copyto(np.frombuffer(self.target, np.uint8)[: len(section)], section)

    def encode(self) -> None:
        self.encoded, start = [], 0
        for section in self.case.sections:
            room = self.room[start : start + self.codec.encoded_bytes_max(len(section))]
            nbytes = self.codec.encode(section, self.case.value_bytes, room)
            self.encoded.append(room[:nbytes])
            start += len(room)

    def decode(self) -> None:
        for section, encoded in zip(self.case.sections, self.encoded, strict=True):
            self.codec.decode(encoded, self.target[: len(section)])

    def encode_plain(self) -> None:
        self.frames = [self.plain.compress(section) for section in self.case.sections]

    def decode_plain(self) -> None:
        for frame in self.frames:
            self.unplain.decompress(frame)

    def gate(self) -> None:
        self.encode()
        for section, encoded in zip(self.case.sections, self.encoded, strict=True):
            self.codec.decode(encoded, self.target[: len(section)])
            if self.target[: len(section)] != section:
                raise SystemExit(f"gate: {self.case.name} comes back as other bytes")

    def run(self) -> dict[str, float]:
        """GB for each second of this thread, so that others on the machine count for little."""
        works = (self.copy, self.encode, self.decode, self.encode_plain, self.decode_plain)
        speeds = {}
        for work in works:
            start = time.thread_time()
            work()
            speeds[work.__name__] = self.case.nbytes / (time.thread_time() - start) / 1e9
        return speeds


def measure(all_cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Return a row of figures for each case; the first round only warms up."""
    turns = [Turn(case) for case in all_cases]
    for turn in turns:
        turn.gate()
    speeds = [[turn.run() for turn in turns] for _ in range(rounds + 1)][1:]
    rows = []
    for index, turn in enumerate(turns):
        figures = {
            name: spread([round_[index][name] for round_ in speeds]) for name in speeds[0][index]
        }
        encoded, plain = sum(map(len, turn.encoded)), sum(map(len, turn.frames))
        nbytes = turn.case.nbytes
        ratios = {"ratio": nbytes / encoded, "ratio_plain": nbytes / plain}
        rows.append({"case": turn.case.name, "bytes": nbytes, **ratios, "gb_per_s": figures})
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        told = f"{row['ratio']:.3f}, plain zstd {row['ratio_plain']:.3f}"
        print(f"{row['case']}: {row['bytes'] / 1e6:.1f} MB, ratio {told}")
        for name, figure in row["gb_per_s"].items():
            print("  {:<14} p20 {p20:.2f}  p50 {p50:.2f}  p80 {p80:.2f}".format(name, **figure))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each case (9)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of KV (1024)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = 32 if options.smoke else options.tokens
    pool, layout = made_up() if options.smoke else computed(tokens)
    rows = measure(list(cases(pool, layout, tokens)), 1 if options.smoke else options.rounds)
    report(rows)
    if not options.smoke:
        head = {"model": "SmolLM2-135M-Instruct", "tokens": tokens, "rounds": options.rounds}
        write_row("zstd", {**head, "cases": rows}, ["kvtier", "torch", "zstandard"])


if __name__ == "__main__":
    main()
