"""LMCache's own bench of L2 adapters over KVTier and over its own ``fs`` and ``fs_native``.

``lmcache bench l2 --no-skip-verify``, a process each, the adapters in turn in every round, so that
what else the machine does meets all of them. Each reads what it has just stored: KVTier from its
DRAM, the others from the page cache, ``fs_native_direct`` past it from the disk. KVTier writes
through to its disk meanwhile, and sums and verifies every byte; the others keep no checksums. The
gate is that LMCache verified what came back and that every object was stored and loaded. What
KVTier reaches from a cold disk, ``bench/micro/keyed.py`` measures. Takes about 4 minutes.

    python bench/engines/lmcache_l2.py [--smoke] [--path DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.peers import venvs

KIB = 1024
RUN_S = 300
OURS = ("kvtier", "kvtier_dram")
NOISE_OFF = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
}


@dataclass(frozen=True)
class Size:
    """Objects of one submit, and submits at a time."""

    object_kib: int
    objects: int
    in_flight: int = 1


SIZES = (Size(256, 96), Size(4096, 32))
SMOKE_SIZES = (Size(64, 4),)


def adapters(folder: Path) -> dict[str, dict[str, Any]]:
    options = {"dram": "1GiB", "disk": str(folder / "kvtier"), "weights_id": "bench"}
    plugin = {"module_path": "kvtier_adapters.lmcache", "class_name": "KVTierL2Adapter"}
    native = {"type": "fs_native", "num_workers": 4}
    return {
        "kvtier": {"type": "plugin", **plugin, "adapter_params": options},
        "kvtier_dram": {"type": "plugin", **plugin, "adapter_params": {"dram": "1GiB"}},
        "fs": {"type": "fs", "base_path": str(folder / "fs")},
        "fs_native": {**native, "base_path": str(folder / "native"), "use_odirect": False},
        "fs_native_direct": {**native, "base_path": str(folder / "direct"), "use_odirect": True},
    }


def measure(lmcache: Path, adapter: dict[str, Any], size: Size, output: Path) -> dict[str, float]:
    """Run LMCache's bench once; return GB/s stored and loaded, and lookups' microseconds a key."""
    command = [str(lmcache), "bench", "l2", "--no-skip-verify", "--l1-align-bytes", "4096"]
    command += ["--num-keys", str(size.objects), "--data-size-kb", str(size.object_kib)]
    command += ["--in-flight", str(size.in_flight), "--rounds", "3", "--warmup-rounds", "1"]
    command += ["--lookup-max-hit-rate", "1.0", "--format", "json", "--output", str(output)]
    done = subprocess.run(
        [*command, "--l2-adapter", json.dumps(adapter)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**os.environ, **NOISE_OFF},
        check=False,
    )
    keys = size.objects * size.in_flight
    if done.returncode or f"All {keys} keys data verified OK" not in done.stdout:
        raise SystemExit(f"gate: not every byte comes back\n{done.stdout}\n{done.stderr[-3000:]}")
    metrics = json.loads(output.read_text())["metrics"]
    found = {one["operation"]: one for name, one in metrics.items() if name.startswith("op_")}
    for name in ("Store", "Load"):
        if found[name]["total_success"] != found[name]["total_keys"]:
            raise SystemExit(f"gate: {name} did {found[name]['total_success']} of all objects")
    nbytes = keys * size.object_kib * KIB
    return {
        "store_GB_s": nbytes / found["Store"]["duration_p50_ms"] / 1e6,
        "load_GB_s": nbytes / found["Load"]["duration_p50_ms"] / 1e6,
        "lookup_us_a_key": found["Lookup"]["latency_per_key_ms"] * 1e3,
    }


def run(size: Size, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all adapters in turn, in every round with empty folders."""
    lmcache = venvs.python_with_kvtier("lmcache").parent / "lmcache"
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name, adapter in adapters(folder).items():
            found = measure(lmcache, adapter, size, folder / "output.json")
            measured.setdefault(name, []).append(found)
            shutil.rmtree(folder)
            folder.mkdir()
    figures = {
        name: {what: spread([one[what] for one in all_of]) for what in all_of[0]}
        for name, all_of in measured.items()
    }
    print(f"{size.objects} x {size.object_kib} KiB, {size.in_flight} in flight")
    for name, spreads in figures.items():
        told = "  ".join(f"{what} {values['p50']:8.2f}" for what, values in spreads.items())
        print(f"  {name:18} {told}")
    return {"size": vars(size), "adapters": figures, "over": ratios(measured)}


def ratios(measured: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """How many times as fast as each of LMCache's own KVTier is, round by round."""
    found: dict[str, dict[str, Any]] = {}
    for ours, theirs in itertools.product(OURS, sorted(measured.keys() - set(OURS))):
        pairs = list(zip(measured[ours], measured[theirs], strict=True))
        over = {
            what: spread([us[what] / them[what] for us, them in pairs])
            for what in ("store_GB_s", "load_GB_s")
        }
        found[f"{ours} over {theirs}"] = over
        told = "  ".join(f"{what} {values['p50']:5.2f}" for what, values in over.items())
        print(f"  {ours + ' over ' + theirs:32} {told}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", type=Path, help="where the disks are; a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes, rounds = (SMOKE_SIZES, 1) if options.smoke else (SIZES, options.rounds)
    folder = Path(tempfile.mkdtemp(dir=options.path))
    try:
        rows = [run(size, rounds, folder) for size in sizes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not options.smoke:
        figures = {"lmcache": venvs.release("lmcache"), "rounds": rounds, "sizes": rows}
        write_row("lmcache_l2", figures)


if __name__ == "__main__":
    main()
