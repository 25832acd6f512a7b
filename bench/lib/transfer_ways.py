"""All ways across the link, codec by codec, and what else bounds them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import torch

from bench.lib.journal import Journal
from bench.lib.report import spread
from bench.lib.transfer import HBM, STAGED, Lab
from kvtier.interfaces import BlockCodec
from kvtier.types import Direction
from kvtier_kernels.transfer.lane import Way
from kvtier_kernels.transfer.triton import UNLIMITED

#: Rows, warps and tiles in flight, and with how many programs; zeros stand for a kernel's own.
SHAPES: Final[dict[tuple[int, int, int], tuple[int, ...]]] = {
    (0, 0, 1): (16, 64, UNLIMITED),
}
STAGED_SHAPES: Final[dict[tuple[int, int, int], tuple[int, ...]]] = {
    (0, 0, 1): (16, 32, 64, UNLIMITED),
    (128, 8, 1): (32,),
}
FEW: Final = 32


def copy_batches(lab: Lab, piece_bytes: int) -> dict[str, Any]:
    """One call of the driver for many small copies, instead of a kernel: CUDA 12.8 or later."""
    from cuda.bindings import runtime

    count = min(8192, lab.slots.numel() // piece_bytes)
    device = torch.empty(2 * count * piece_bytes, dtype=torch.uint8, device=lab.device)
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(3)).tolist()
    scattered = [device.data_ptr() + piece_bytes * place for place in order[:count]]
    together = [lab.slots.data_ptr() + piece_bytes * nth for nth in range(count)]
    packs = lab.direction is Direction.STORE
    targets, sources = (together, scattered) if packs else (scattered, together)
    attributes = runtime.cudaMemcpyAttributes()
    order_of_stream = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    attributes.srcAccessOrder = order_of_stream
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        error, *_ = runtime.cudaMemcpyBatchAsync(
            targets, sources, [piece_bytes] * count, count, [attributes], [0], 1,
            stream.cuda_stream,
        )  # fmt: skip
        stream.synchronize()
        seconds.append(time.perf_counter() - start)
        if int(error):
            raise RuntimeError(str(error))
    moved = count * piece_bytes
    return {"pieces": count, "gb_per_s": spread([moved / each / 1e9 for each in seconds[1:]])}


def ways() -> Iterator[tuple[str, Way]]:
    """All that are measured: straight to the host and over a buffer, tiles of several shapes."""
    for direct, shapes in ((True, SHAPES), (False, STAGED_SHAPES)):
        for (rows, warps, stages), counts in shapes.items():
            for programs in counts:
                yield "direct" if direct else "staged", Way(direct, programs, rows, warps, stages)


def measure(lab: Lab, journal: Journal, names: Sequence[str], rounds: int) -> None:
    """Measure codec by codec."""
    limits = lab.limits()
    journal.row(limits=limits, device=lab.name, torch=torch.__version__)
    link = limits["d2h" if lab.direction is Direction.STORE else "h2d"]
    journal.attempt_boundary({"codec": "none"}, lambda: lab.matrices(None, HBM))
    for piece_bytes in (256, 4096, 32_768):
        what = {"codec": "none", "kind": "driver's batch", "piece_bytes": piece_bytes}
        journal.attempt_boundary(what, partial(copy_batches, lab, piece_bytes))
    for name in names:
        codec = lab.codec(name)
        if passes(lab, journal, codec):
            in_hbm(lab, journal, codec)
            beside(lab, journal, codec, over_the_link(lab, journal, codec, rounds, link))


def passes(lab: Lab, journal: Journal, codec: BlockCodec) -> bool:
    """The gate, both ways across the link."""

    def gate(way: Way) -> dict[str, Any]:
        lab.gate(codec, way)
        return {"passed": True}

    direct = journal.attempt_boundary({"codec": codec.name, "gate": "direct"}, lambda: gate(HBM))
    staged = journal.attempt_boundary({"codec": codec.name, "gate": "staged"}, lambda: gate(STAGED))
    return bool(direct and staged)


def in_hbm(lab: Lab, journal: Journal, codec: BlockCodec) -> None:
    """Kernels alone."""
    for rows, warps in ((0, 0), (128, 4), (128, 8)):
        way = replace(HBM, rows=rows, warps=warps)
        what = {"codec": codec.name, "kind": "hbm", **asdict(way)}
        journal.attempt_boundary(what, partial(lab.timed_in_hbm, codec, way, 5))


def over_the_link(
    lab: Lab, journal: Journal, codec: BlockCodec, rounds: int, link: float
) -> dict[str, tuple[float, Way]]:
    """All ways; the fastest of each kind with few programs, and with many."""
    best: dict[str, tuple[float, Way]] = {}
    for kind, way in ways():

        def timed(way: Way = way) -> dict[str, Any]:
            found = lab.timed(codec, way, rounds)
            return {**found, "share_of_link": found["wire_gb_per_s"] / link}

        found = journal.attempt_boundary({"codec": codec.name, "kind": kind, **asdict(way)}, timed)
        if found:
            name = kind if way.programs <= FEW else f"{kind}, many"
            speed = found["gb_per_s"]["p50"]
            if name not in best or speed > best[name][0]:
                best[name] = speed, way
    return best


def beside(
    lab: Lab, journal: Journal, codec: BlockCodec, best: dict[str, tuple[float, Way]]
) -> None:
    """A model's products beside the fastest ways."""
    for kind, (speed, way) in best.items():
        what = {"codec": codec.name, "best": kind, "gb_per_s": speed, **asdict(way)}
        journal.attempt_boundary(what, partial(lab.matrices, codec, way))
