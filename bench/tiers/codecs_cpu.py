"""Codecs on one core of a CPU: pack and unpack against memcpy and LMCache's fp8 serde.

Chunks of 256 tokens with 8 KV heads of 128 values in bfloat16, in a pool whose blocks of 16 tokens
are used in no order. Figures are GB/s of the pool's bytes, whatever is left of them when packed, by
the time that the core ran the thread, of which what else the machine does takes none. Each codec's
turn is a memcpy of as many bytes, its pack, its unpack, and a turn of the peer
(``peers/venvs.py``), whose chunks lie in one piece; its fp8 is a cast without scale or check, and
the only lossy serde of LMCache that runs on a CPU. Ratios are of speeds of the same turn.
The gate is that packed bytes are the same each time, and values back within the codec's bound.

    python bench/tiers/codecs_cpu.py [--smoke] [--rounds N] [--codecs NAME ...] [--peers]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

# torch asks at its first allocation: pools in huge pages, like the tiers and the engine's own.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.limits import huge_buffer
from bench.tiers.peers import venvs
from bench.tiers.peers.lockstep import Job, Peer
from kvtier.codecs.centred import CENTRED
from kvtier.codecs.sections import section_offset
from kvtier.interfaces import BlockCodec
from kvtier.registry import codecs
from kvtier.testing.calibrations import made_up_calibration
from kvtier.testing.codec_contract import Shape
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import GroupKind, KVGroup, Part, ShardLayout

BLOCK: Final = 16
HEADS: Final = 8
DIM: Final = 128

#: Largest error of a chunk's normally distributed values, as a share of their norm. In ``int4``
#: the mean that is taken from K is made up here, and doubles its energy.
ERROR_MAX: Final = {
    "raw": 0.0,
    "lossless": 0.0,
    "fp8": 0.03,
    "int8": 0.0075,
    "int6": 0.031,
    "int5k4v": 0.08,
    "int4": 0.125,
    "int4-g128": 0.13,
}

#: What each of ours is compared with, by the peer's name for it.
PEER_PATHS: Final = {"pack": "store", "unpack": "retrieve"}


class Room:
    """Chunks in scattered blocks of a pool, room for what they pack to, and a pool to unpack to."""

    def __init__(self, layout: ShardLayout, chunks: int) -> None:
        self.layout = layout
        self.chunks = chunks
        layers = tuple(range(layout.layers))
        group = KVGroup(GroupKind.FULL, layers, HEADS, DIM, DIM, layout.dtype)
        count = chunks * layout.tokens // BLOCK
        ids = list(range(count))
        random.Random(7).shuffle(ids)
        each = layout.tokens // BLOCK
        self.blocks = [ids[start : start + each] for start in range(0, count, each)]
        self.source, self.target = (
            TorchPool([group], block_count=count, arrangement=Arrangement.STACKED) for _ in range(2)
        )
        self.source.fill_values(7)
        self.chunk_bytes = 2 * layout.layers * layout.tokens * HEADS * DIM * 2
        # No codec's payload is larger than the values, but for what aligns its sections.
        self.payloads = huge_buffer(chunks * self.chunk_bytes * 2)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that a turn moves."""
        return self.chunks * self.chunk_bytes

    def memcpy(self) -> None:
        """Copy as many bytes, a chunk at a time."""
        both = torch.frombuffer(self.payloads, dtype=torch.uint8).view(2, self.chunks, -1)
        for source, target in zip(*both, strict=True):
            target.copy_(source)


class Traffic:
    """A codec's moves of all chunks; the first one begins a sequence, so sinks are kept of it."""

    def __init__(self, room: Room, name: str) -> None:
        made: BlockCodec = (
            codecs.load(name)(made_up_calibration(room.layout))
            if name in CENTRED
            else codecs.load(name)()
        )
        self.room, self.name, self.codec = room, name, made
        self.moves, self.payloads = [], []
        start = 0
        for nth, blocks in enumerate(room.blocks):
            sinks = made.traits.sink_tokens if nth == 0 else 0
            layout = replace(room.layout, sink_tokens=sinks)
            move = Shape(layout, BLOCK).move(blocks)
            self.moves.append(replace(move, position_start=nth * layout.tokens))
            end = start + section_offset(made, layout, layout.sections)
            self.payloads.append(room.payloads[start:end])
            start = end
        self.packed_bytes = start

    def pack(self) -> None:
        for move, payload in zip(self.moves, self.payloads, strict=True):
            self.codec.pack(self.room.source, move, payload)

    def unpack(self) -> None:
        for move, payload in zip(self.moves, self.payloads, strict=True):
            self.codec.unpack(payload, self.room.target, move)

    def packed(self, poison: int) -> list[bytes]:
        """Pack into room that held other bytes; return all sections."""
        self.room.payloads[:] = bytes([poison]) * self.room.payloads.nbytes
        self.pack()
        sections = []
        for move, payload in zip(self.moves, self.payloads, strict=True):
            for section in range(move.layout.sections):
                start = section_offset(self.codec, move.layout, section)
                end = start + self.codec.section_bytes(move.layout, section)
                sections.append(bytes(payload[start:end]))
        return sections

    def gate(self) -> float:
        """Return the error, as a share of the values' norm."""
        if self.packed(0) != self.packed(0xEE):
            raise SystemExit(f"gate: {self.name} packs to other bytes the second time")
        self.room.target.poison()
        self.unpack()
        error = energy = 0.0
        for layer in range(self.room.layout.layers):
            for part in Part:
                before, after = (
                    pool.layer_view(0, layer, part).float()
                    for pool in (self.room.source, self.room.target)
                )
                error += float((after - before).square().sum())
                energy += float(before.square().sum())
        share = math.sqrt(error / energy)
        # NaN compares false as well.
        if not share <= ERROR_MAX[self.name]:
            raise SystemExit(f"gate: {self.name} comes back with an error of {share:.4f}")
        return share

    def turn(self) -> dict[str, float]:
        """GB/s."""
        seconds = {
            "memcpy": core_time(self.room.memcpy),
            "pack": core_time(self.pack),
            "unpack": core_time(self.unpack),
        }
        return {what: self.room.nbytes / value / 1e9 for what, value in seconds.items()}


def core_time(work: Callable[[], object]) -> float:
    """Seconds that this thread was running."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(all_traffic: Sequence[Traffic], peer: Peer | None, rounds: int) -> list[dict[str, Any]]:
    """Return a row of figures for each codec; the first round only warms up."""
    turns: dict[str, list[dict[str, float]]] = {traffic.name: [] for traffic in all_traffic}
    errors = {traffic.name: traffic.gate() for traffic in all_traffic}
    for number in range(rounds + 1):
        for traffic in all_traffic:
            speeds = traffic.turn()
            if peer is not None:
                answer = peer.round(number)
                speeds |= {f"peer {ours}": answer[theirs] for ours, theirs in PEER_PATHS.items()}
            turns[traffic.name].append(speeds)
    rows = []
    for traffic in all_traffic:
        figures = compared(turns[traffic.name][1:])
        ratio = traffic.room.nbytes / traffic.packed_bytes
        head = {"codec": traffic.name, "packed_ratio": round(ratio, 3)}
        rows.append({**head, "error": round(errors[traffic.name], 6), **figures})
    return rows


def compared(turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Each direction's speeds, and what they are of memcpy's and of the peer's."""
    figures: dict[str, Any] = {}
    for ours in PEER_PATHS:
        figures[ours] = {"gb_per_s": spread([turn[ours] for turn in turns])}
        for other, key in (("memcpy", "memcpy"), ("lmcache fp8", f"peer {ours}")):
            if key in turns[0]:
                figures[f"{ours} / {other}"] = {
                    "ratio": spread([turn[ours] / turn[key] for turn in turns]),
                    "other": spread([turn[key] for turn in turns]),
                }
    return figures


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print each codec's speeds, and below each what it is compared with."""
    shown = "p20 {p20:.3f}  p50 {p50:.3f}  p80 {p80:.3f}".format_map
    for row in rows:
        print(f"{row['codec']}: packed {row['packed_ratio']:.2f} times, error {row['error']:.4f}")
        for name, figure in row.items():
            if isinstance(figure, dict) and "ratio" in figure:
                told = f"{shown(figure['ratio'])}   of {figure['other']['p50']:.2f} GB/s"
                print(f"    {name:<22} {told}")
            elif isinstance(figure, dict):
                print(f"  {name:<24} {shown(figure['gb_per_s'])}   GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each codec (15)")
    parser.add_argument("--codecs", nargs="+", default=list(ERROR_MAX), choices=list(ERROR_MAX))
    parser.add_argument("--peers", action="store_true", help="LMCache's fp8 beside ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, layers, chunks = (32, 2, 2) if options.smoke else (256, 32, 2)
    room = Room(ShardLayout(layers, HEADS, DIM, DIM, "bfloat16", tokens), chunks)
    all_traffic = [Traffic(room, name) for name in options.codecs]
    with tempfile.TemporaryDirectory() as folder:
        job = Job("fp8", layers, HEADS, DIM, tokens, chunks, folder)
        log = venvs.FOLDER / "lmcache.log"
        python = venvs.python("lmcache") if options.peers else None
        peer = Peer(python, "lmcache_paths.py", job, log) if python else None
        rows = measure(all_traffic, peer, 1 if options.smoke else options.rounds)
        if peer:
            peer.close()
    report(rows)
    if not options.smoke:
        shape = f"{chunks} chunks of {tokens} tokens, {layers} layers, {HEADS} heads of {DIM}"
        head = {"shape": f"{shape}, bfloat16", "threads": 1, "rounds": options.rounds}
        write_row("codecs_cpu", {**head, "codecs": rows}, ["kvtier", "torch"])


if __name__ == "__main__":
    main()
