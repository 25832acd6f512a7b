"""What does page-locking the arena gain, and what does it cost?

Copies between a GPU and an arena before and after ``pinned.register``, and the seconds per GiB
that registering takes, for an arena of this process and one shared with others. Needs a CUDA
device. The gate is that every byte comes back.

    python bench/kernels/pinned.py [--smoke] [--gib N] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import GIB, MIB
from kvtier.tiers.arena import Arena
from kvtier_kernels import pinned

COPY_BYTES = 256 * MIB


def gb_per_s(target: torch.Tensor, source: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return source.numel() / (time.perf_counter() - start) / 1e9


def copies(arena: Arena, nbytes: int, rounds: int) -> dict[str, dict[str, float]]:
    host = torch.frombuffer(arena.memory[:nbytes], dtype=torch.uint8)
    host.random_(0, 255)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    original = host.clone()
    gb_per_s(device, host)
    to_device = [gb_per_s(device, host) for _ in range(rounds)]
    host.zero_()
    to_host = [gb_per_s(host, device) for _ in range(rounds)]
    if not torch.equal(host, original):
        raise SystemExit("gate: other bytes came back")
    return {"h2d_gb_per_s": spread(to_device), "d2h_gb_per_s": spread(to_host)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--gib", type=int, default=16, help="size of the arena (16)")
    parser.add_argument("--rounds", type=int, default=15, help="of each copy (15)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    nbytes = 64 * MIB if options.smoke else options.gib * GIB
    copied, rounds = min(COPY_BYTES, nbytes), 1 if options.smoke else options.rounds
    for shared in (False, True):
        start = time.perf_counter()
        arena = Arena(nbytes, shared=shared)
        mapped_s = time.perf_counter() - start
        pageable = copies(arena, copied, rounds)
        start = time.perf_counter()
        locked = pinned.register(arena.memory)
        seconds = time.perf_counter() - start
        if not locked:
            raise SystemExit("cudaHostRegister refused")
        figures = {
            "device": torch.cuda.get_device_name(),
            "shared": shared,
            "huge": arena.huge,
            "arena_bytes": nbytes,
            "map_s_per_gib": mapped_s / nbytes * GIB,
            "register_s_per_gib": seconds / nbytes * GIB,
            "pageable": pageable,
            "locked": copies(arena, copied, rounds),
        }
        pinned.unregister(arena.memory)
        arena.close()
        print(figures)
        if not options.smoke:
            write_row("pinned", figures, ["kvtier", "torch"])


if __name__ == "__main__":
    main()
