"""The examples run, as a reader would run them, and end well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.server import LOAD_ALWAYS
from tests.tidy.sources import ROOT

TIMEOUT_S = 280


def run_example(name: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_store_and_load(tmp_path: Path) -> None:
    said = run_example("store_and_load.py", folder=tmp_path)
    assert "after restart: {'disk': 512}" in said


def test_restart_reuse_gives_the_same_text_from_disk(tmp_path: Path) -> None:
    said = run_example(
        "restart_reuse.py",
        "--json",
        "--repetitions=1",
        "--prompt-tokens=400",
        "--max-tokens=8",
        "--dram=256MiB",
        LOAD_ALWAYS,
        folder=tmp_path,
    )
    summary = json.loads(said)
    (run,) = summary["repetitions"]
    assert summary["same_text"]
    assert not any(run["cold"]["cached_by_tier"].values())
    whole_chunks = run["restarted"]["prompt_tokens"] // 256 * 256
    assert whole_chunks
    assert run["restarted"]["cached_by_tier"]["disk"] == whole_chunks


def test_restart_reuse_compares_codecs_with_raw(tmp_path: Path) -> None:
    said = run_example(
        "restart_reuse.py",
        "--json",
        "--codec=int8",
        "--prompts=2",
        "--prompt-tokens=320",
        "--max-tokens=4",
        "--dram=256MiB",
        folder=tmp_path,
    )
    summary = json.loads(said)
    raw, int8 = summary["codecs"]
    assert summary["disk_tokens"] == 2 * 256
    assert (raw["codec"], raw["same_tokens"], raw["same_texts"]) == ("raw", 1.0, 2)
    assert (raw["raw_over_its"], raw["same_first_tokens"]) == (1.0, 2)
    assert int8["codec"] == "int8"
    assert int8["same_tiers"]
    assert int8["in_16_bits_over_its"] > 1.8
    assert int8["raw_over_its"] > 3.6
    assert int8["same_tokens"] > 0.5


def test_shared_store_async_reads_what_another_client_has_written(tmp_path: Path) -> None:
    said = run_example("shared_store_async.py", folder=tmp_path)
    assert said.splitlines() == ["there: [True, False]", "read: 8 of 9", "left: [False]"]


def test_shared_store_sync_gets_what_another_process_has_put(tmp_path: Path) -> None:
    said = run_example("shared_store_sync.py", folder=tmp_path).splitlines()
    assert said[0].split() == ["put:", *["dram"] * 8]
    assert said[1].split() == ["got:", *["remote"] * 8, "absent"]
    assert said[2:] == ["same bytes: True", "again: dram dram dram dram dram dram dram dram"]


@pytest.mark.parametrize("name", ["shared_store_async.py", "shared_store_sync.py"])
def test_shared_stores_may_be_any_connectors(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    url = f"sharded+file://{tmp_path}/a,{tmp_path}/b"
    said = run_example(name, f"--url={url}", folder=tmp_path)
    assert "read: 8 of 9" in said or "same bytes: True" in said


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    programs = (path for path in (ROOT / "examples").glob("*.py"))
    names = [path.name for path in programs if "__main__" in path.read_text(encoding="utf-8")]
    assert names
    assert all(f'"{name}"' in here for name in names)
