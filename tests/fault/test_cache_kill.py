"""The process of a cache is killed in the middle of its work; the next one serves what is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.engine_double import wait_until
from tests.lib.cache_setup import (
    CHUNK,
    CacheSetup,
    cache_setup,
    written,
)

ROOT = Path(__file__).resolve().parents[2]
DISK_CHUNKS = 12
STARTS = range(0, 4000, 100)
STORER = f"""
import sys
from pathlib import Path
from tests.lib.cache_setup import CHUNK, CacheSetup

engine = CacheSetup(Path(sys.argv[1])).open(dram_chunks=8, disk_chunks={DISK_CHUNKS})
engine.match(engine.sequence([]))
for turn in range(10**6):
    for start in range({STARTS.start}, {STARTS.stop}, {STARTS.step}):
        engine.store(engine.sequence(range(start, start + 3 * CHUNK)))
        print(turn, start, flush=True)
"""


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_b66_kill_9_while_storing_leaves_whole_chunks_within_the_bound(
    setup: CacheSetup, rng: random.Random
) -> None:
    lines = rng.randrange(20, 60)
    with subprocess.Popen(
        [sys.executable, "-c", STORER, str(setup.folder)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert 0 < len(setup.shard_files()) <= DISK_CHUNKS

    engine = setup.open(dram_chunks=64, disk_chunks=DISK_CHUNKS)
    found = 0
    for start in STARTS:
        match = engine.match(engine.sequence(range(start, start + 3 * CHUNK)))
        if match.hits:
            assert engine.load(match).outcome.end_token == match.tokens
            found += len(match.hits)
    wait_until(lambda: found == len(setup.shard_files()), "what lies there is not reachable")
    assert not list((setup.folder / "disk" / "incoming").iterdir())
    for start in STARTS:
        engine.store(engine.sequence(range(start, start + 3 * CHUNK)))
        written(engine)
        assert len(setup.shard_files()) <= DISK_CHUNKS
