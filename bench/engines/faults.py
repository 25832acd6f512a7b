"""The same faults under KVTier's connector and under vLLM's own tiers, its ``fs`` the last.

Real vLLM on a CPU (float32, SmolLM2-135M, greedy). Each way stores the KV of ten prompts on a disk;
a new vLLM then answers them from a copy of that folder with a fault in it, within a time limit: a
hang is a result. The scheduler, the CPU tier and ``fs`` are vLLM's; the worker that copies between
vLLM's pool and its CPU tier is ours, because vLLM's needs CUDA (``tests/engines/cpu_copies.py``).

    python bench/engines/faults.py [--smoke] [--way kvtier|vllm] [--path DIR]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import write_row
from bench.tiers.peers import venvs
from tests.lib.vllm_runs import (
    BLOCK_TOKENS,
    Ended,
    Prompt,
    Served,
    VllmRun,
    prompts,
)
from tests.lib.vllm_tier_runs import start_tiers

#: Twenty times what a run takes on two quiet cores, start included.
LIMIT_S = 480.0
PROMPT_TOKENS, ANSWER_TOKENS = 250, 8
SHARE = 0.3
#: Patient, so that what comes is not a question of how busy the machine is.
DEADLINES = {"load_deadline_s": 20, "pending_deadline_s": 20, "gpu_time_worth": 1e6}
SEED = 11
SUFFIXES = {".kvs", ".bin"}

Fault = Callable[[Path, random.Random], None]
#: Starts vLLM over a folder; True: with zeros in place of what is loaded.
Start = Callable[[Path, list[Prompt], bool], Ended]


def corrupt(path: Path, rng: random.Random) -> None:
    """The second half becomes noise, as after a write that was torn over older bytes."""
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + rng.randbytes(len(data) - half))


def truncate(path: Path, rng: random.Random) -> None:
    del rng
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path, rng: random.Random) -> None:
    del rng
    path.unlink()


def hang(path: Path, rng: random.Random) -> None:
    """Whoever opens it waits for ever."""
    del rng
    path.unlink()
    os.mkfifo(path)


@dataclass(frozen=True)
class Case:
    """A line of the table: what becomes of which share of the files."""

    name: str
    fault: Fault | None = None
    share: float = SHARE
    zeros: bool = False


CASES = (
    Case("nothing is wrong"),
    Case("30 % of the files half noise", corrupt),
    Case("30 % cut in half", truncate),
    Case("30 % missing", remove),
    Case("every file hangs", hang, share=1.0),
    Case("control: zeros are loaded", zeros=True),
)
SMOKE_CASES = CASES[1:2]


def connector(folder: Path, asked: list[Prompt], zeros: bool) -> Ended:
    sizes = {"dram": "256MiB", "disk": str(folder), "chunk_tokens": BLOCK_TOKENS}
    run = VllmRun(sizes | DEADLINES, zeros=zeros, run_s=LIMIT_S)
    return run.serve(asked, ANSWER_TOKENS).metrics().forget().start()


def own_tiers(folder: Path, asked: list[Prompt], zeros: bool) -> Ended:
    table = {"type": "fs", "root_dir": str(folder)}
    return start_tiers(table, asked, None, count=ANSWER_TOKENS, zeros=zeros, run_s=LIMIT_S)


WAYS: dict[str, tuple[str, Start]] = {
    "kvtier": ("KVTier's connector", connector),
    "vllm": ("vLLM's CPU tier and `fs`", own_tiers),
}


def spoil(folder: Path, case: Case) -> int:
    """Do to its share of the files what the case says; return how many were spoilt."""
    rng = random.Random(SEED)
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if len(files) < PROMPT_TOKENS // BLOCK_TOKENS:
        raise SystemExit("gate: what was computed is not on disk")
    chosen = rng.sample(files, round(len(files) * case.share)) if case.fault else []
    for path in chosen:
        assert case.fault is not None
        case.fault(path, rng)
    return len(chosen)


def measure(start: Start, filled: Path, case: Case, plain: Served) -> dict[str, Any]:
    """Answer the prompts over a spoilt copy; say what came of it."""
    with tempfile.TemporaryDirectory(dir=filled.parent) as place:
        folder = Path(place) / "copy"
        shutil.copytree(filled, folder)
        spoilt = spoil(folder, case)
        began = time.monotonic()
        try:
            ended = start(folder, ASKED, case.zeros)
        except subprocess.TimeoutExpired:
            return {"ended": "hang", "spoilt": spoilt, "seconds": LIMIT_S}
        seconds = round(time.monotonic() - began, 1)
    if ended.status:
        return {"ended": "crash", "spoilt": spoilt, "said": ended.errors[-500:]}
    served = ended.served()[0]
    same = sum(one == other for one, other in zip(served.tokens, plain.tokens, strict=True))
    return {
        "ended": "well",
        "spoilt": spoilt,
        "same": same,
        "hit_tokens": hits(ended),
        "seconds": seconds,
    }


def hits(ended: Ended) -> int:
    """Tokens that came from a tier.

    The connector's own count: what vLLM calls cached it sets before the load, and leaves so when
    that fails. vLLM's tiers promote before it asks.
    """
    served, *others = ended.rounds()
    for counted in others:
        if "done" not in counted:
            names = [name for name in counted if name.startswith("vllm:kvtier_hit_tokens")]
            return int(sum(counted[name] for name in names))
    return sum(served["cached"])


def told(found: dict[str, Any]) -> str:
    """A cell of the table."""
    if found["ended"] != "well":
        return (
            "**crash**" if found["ended"] == "crash" else f"**hang**: no answer in {LIMIT_S:.0f} s"
        )
    wrong = len(ASKED) - found["same"]
    answers = f"**{wrong} of {len(ASKED)} answers wrong**" if wrong else "same tokens"
    return f"{answers}; {found['hit_tokens']} hits"


ASKED = prompts(random.Random(SEED), families=10, members=1, shared=PROMPT_TOKENS - 50, own=50)


def run(folder: Path, ways: list[str], cases: tuple[Case, ...]) -> dict[str, dict[str, Any]]:
    """Fill a folder each way, then measure all cases; print the table."""
    plain = VllmRun(None, run_s=LIMIT_S).serve(ASKED, ANSWER_TOKENS).start().served()[0]
    found: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    for way in ways:
        name, start = WAYS[way]
        if start(folder / way, ASKED, False).served()[0].tokens != plain.tokens:
            raise SystemExit(f"gate: {name} changes tokens without any fault")
        for case in cases:
            found[case.name][way] = measure(start, folder / way, case, plain)
            print(f"{way}: {case.name}: {found[case.name][way]}", file=sys.stderr, flush=True)
    print("| Fault | " + " | ".join(WAYS[way][0] for way in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for name, answers in found.items():
        print(f"| {name} | " + " | ".join(told(answers[way]) for way in ways) + " |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one fault: does it run?")
    parser.add_argument("--way", choices=WAYS, action="append", help="this alone; repeatable")
    parser.add_argument("--path", type=Path, help="where the disks are; a temporary folder")
    options = parser.parse_args()
    venvs.python_with_kvtier("vllm")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        cases = SMOKE_CASES if options.smoke else CASES
        found = run(Path(folder), options.way or list(WAYS), cases)
    if not options.smoke:
        sizes = {"prompts": len(ASKED), "prompt_tokens": PROMPT_TOKENS, "limit_s": LIMIT_S}
        write_row("engine_faults", {"vllm": venvs.release("vllm"), **sizes, "cases": found})


if __name__ == "__main__":
    main()
