"""Starting LMCache in its own environment: its bench of L2 adapters, and a program of ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.lib.peers import PATIENT, peer

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = ROOT / "tests" / "engines" / "lmcache_program.py"
#: Longer than any run here on a busy machine; a hang is what these tests look for.
RUN_S: Final = 480.0


def kvtier_adapter(**options: Any) -> dict[str, Any]:
    """The ``--l2-adapter`` of a user who has KVTier."""
    return {
        "type": "plugin",
        "module_path": "kvtier_adapters.lmcache",
        "class_name": "KVTierL2Adapter",
        "adapter_params": options,
    }


def on_disk(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a cache with a disk, patient as ``PATIENT`` is."""
    disk = {"disk": str(folder), "disk_bytes": "1GiB"}
    return {"dram": "256MiB", **disk, "weights_id": "weights 1", **PATIENT, **options}


def bench_l2(adapter: dict[str, Any], *arguments: str) -> str:
    """Run ``lmcache bench l2``; return what it printed. ``AssertionError`` unless it ended well."""
    command = [
        str(peer("lmcache") / "bin" / "lmcache"),
        "bench",
        "l2",
        "--l2-adapter",
        json.dumps(adapter),
    ]
    done = _run([*command, *arguments], "")
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout


def run_lmcache(what: str, **orders: Any) -> Any:
    """Run a part of ``lmcache_program.py``; return what it found."""
    done = _run(["python", str(PROGRAM), what], json.dumps(orders))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert (done.returncode, len(lines)) == (0, 1), (
        f"it ended with {done.returncode}:\n{done.stderr[-4000:]}"
    )
    leaks = (done.stdout + done.stderr).count("is being garbage collected with ref_count")
    assert not leaks, f"{leaks} buffers of LMCache's were let go instead of given back"
    return json.loads(lines[0].removeprefix("RESULT "))


def _run(command: list[str], orders: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
    }
    script, *arguments = command
    return subprocess.run(
        [str(peer("lmcache") / "bin" / script), *arguments],
        input=orders,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=environment,
        check=False,
    )
