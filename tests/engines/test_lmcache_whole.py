"""Real LMCache over KVTier: restarts, corrupt files, dtypes, locks, and moving over from ``fs``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from tests.lib.lmcache_runs import ROOT, kvtier_adapter, on_disk, run_lmcache

pytestmark = pytest.mark.timeout(1500)

NUMBERS = list(range(1, 7))
LAYOUT = "bfloat16[2,4,16,64]"
OBJECT_BYTES = 2 * 2 * 4 * 16 * 64


def step(name: str, numbers: list[int] = NUMBERS, dtype: str = "bfloat16", salt: str = "") -> Any:
    return (name, numbers, dtype, salt)


def spoil(folder: Path, how: str) -> int:
    """Spoil every file of objects below a folder; return how many."""
    files = [path for path in folder.rglob("*") if path.suffix in {".kvs", ".data"}]
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    return len(files)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_b44_b66_b78_after_a_restart_corrupt_objects_are_misses_and_are_stored_again(
    tmp_path: Path, how: str
) -> None:
    """LMCache's own ``fs`` gives flipped bits back as a hit, and never mends a torn file."""
    ours, theirs = tmp_path / "kvtier", tmp_path / "fs"
    for adapter, folder in (
        (kvtier_adapter(**on_disk(ours)), ours),
        ({"type": "fs", "base_path": str(theirs)}, theirs),
    ):
        assert run_lmcache("l2", adapter=adapter, steps=[step("store")]) == [True]
        assert spoil(folder, how) == 6
        steps = [step("load"), step("store"), step("load")]
        before, stored, after = run_lmcache("l2", adapter=adapter, steps=steps)
        assert stored, "both say that the objects are stored"
        if folder == ours:
            assert (before, after) == (["miss"] * 6, ["same"] * 6)
        else:
            bad = "wrong" if how == "flip" else "miss"
            assert (before, after) == ([bad] * 6, [bad] * 6), "the peer is what we think it is"


def test_b27_half_precision_is_not_taken_for_bfloat16(tmp_path: Path) -> None:
    adapter = kvtier_adapter(**on_disk(tmp_path))
    steps = [step("store"), step("load", dtype="float16"), step("load", dtype="float16")]
    assert run_lmcache("l2", adapter=adapter, steps=steps)[1:] == [["miss"] * 6] * 2


def test_locks_hold_off_deletion_and_the_books_are_right(tmp_path: Path) -> None:
    adapter = kvtier_adapter(**on_disk(tmp_path))
    steps = [
        step("store"),
        step("store", [1], salt="acme"),
        step("usage"),
        step("lookup", [1, 99, 2]),
        step("delete"),
        step("load"),
        step("usage"),
        step("unlock", [1, 2]),
        step("delete"),
        step("load"),
        step("load", [1], salt="acme"),
        step("usage"),
        step("status"),
    ]
    answers = run_lmcache("l2", adapter=adapter, steps=steps)
    assert answers[2] == 7 * OBJECT_BYTES
    assert answers[3] == [1, 2]
    assert answers[5] == ["same", "same", "miss", "miss", "miss", "miss"]
    assert answers[6] == 3 * OBJECT_BYTES
    assert answers[9:12] == [["miss"] * 6, ["same"], OBJECT_BYTES]
    status = answers[12]
    assert (status["is_healthy"], status["layouts"], status["locked"]) == (True, [LAYOUT], 0)
    assert set(status["tiers"]) == {"dram", "disk"}


def test_what_an_fs_adapter_kept_is_taken_over(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "fs", tmp_path / "kvtier"
    peer = {"type": "fs", "base_path": str(theirs)}
    steps = [step("store"), step("store", [1, 2], salt="acme")]
    assert run_lmcache("l2", adapter=peer, steps=steps) == [True, True]
    command = ["import-lmcache", str(theirs), "--layout", LAYOUT, "--weights-id", "weights 1"]
    done = CliRunner().invoke(app, [*command, "--disk", str(ours), "--dram", "64MiB"])
    assert "8 objects found, 8 stored" in done.stdout, done.output
    steps = [step("lookup"), step("load"), step("load", [1, 2, 3], salt="acme")]
    answers = run_lmcache("l2", adapter=kvtier_adapter(**on_disk(ours)), steps=steps)
    assert answers == [NUMBERS, ["same"] * 6, ["same", "same", "miss"]]


def test_the_bench_beside_lmcaches_own_adapters_runs_small() -> None:
    command = [sys.executable, "bench/engines/lmcache_l2.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    for name in ("kvtier", "kvtier_dram", "fs", "fs_native", "fs_native_direct"):
        assert f"  {name} " in done.stdout
