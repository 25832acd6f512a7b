"""The process of a cache is killed again and again in the middle of its work, on one directory.

It stores, evicts and reclaims within a small bound; where the kill finds it is drawn. After each
kill the directory is verified, and the next cache serves what was on disk, every byte of it right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cache.cache import Cache
from kvtier.cli.main import app
from kvtier.config import Durability, WriteMode
from kvtier.constants import JOURNAL_CHANGES_LOGGED
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Problem, Verdict, Verifier
from kvtier.types import ChunkKey
from tests.lib.disk_lab import bytes_on_disk
from tests.lib.kill_child import CHAINS, CHUNK_BYTES, DISK_CHUNKS, Job, chain
from tests.lib.kill_engine import PatternEngine
from tests.lib.kill_host import KillHost, kill_host, whole_chunks
from tests.lib.soak_report import report

ROUNDS = 10
#: What a kill may leave. Of several directories each has a thread of its own, so that a child may
#: be there without its parent, or a chunk anew before its old file was removed.
LEFT = {1: {Problem.LEFTOVER}, 2: {Problem.LEFTOVER, Problem.ORPHAN, Problem.TWIN}}
#: Of so many rounds the command itself verifies one.
COMMAND_EVERY = 5
REPORTS_MAX = 120
POLICIES = ("lru", "arc", "gittins")


@pytest.fixture(scope="module")
def host() -> Iterator[KillHost]:
    with kill_host() as host:
        yield host


def drawn_job(rng: random.Random, folders: tuple[str, ...]) -> Job:
    """An index that is folded all the time, or never; now and then all else that may differ."""
    return Job(
        seed=rng.randrange(1 << 32),
        folders=folders,
        changes_logged=rng.choice((1, 4, JOURNAL_CHANGES_LOGGED)),
        durability=rng.choice(tuple(Durability)),
        mode=rng.choice((WriteMode.THROUGH, WriteMode.THROUGH, WriteMode.BACK)),
        policy=rng.choice(POLICIES),
        byte_codec=rng.choice((None, "zstd", "zstd")),
    )


def verified(folders: tuple[str, ...]) -> Verdict:
    verifier = Verifier(folders, LocalFiles())
    for _ in verifier.run():
        pass
    return verifier.verdict


def verify_by_command(folders: tuple[str, ...]) -> None:
    """Leftovers and orphans are told and are no reason to fail."""
    result = CliRunner().invoke(app, ["verify", *folders, "--json"])
    problems = {finding["problem"] for finding in json.loads(result.stdout)["findings"]}
    assert problems <= LEFT[len(folders)]
    assert result.exit_code == int(bool(problems - {Problem.LEFTOVER, Problem.ORPHAN}))


def check_round(job: Job, remaining: set[str]) -> int:
    """Hold what a kill left against what had been reported; return the chunks served."""
    for folder in job.folders:
        assert bytes_on_disk(folder) <= DISK_CHUNKS // len(job.folders) * CHUNK_BYTES
    verdict = verified(job.folders)
    found = {finding.problem for finding in verdict.findings}
    assert found <= LEFT[len(job.folders)], verdict.findings
    assert verdict.quarantined_files == 0

    cache = Cache(job.config(dram_chunks=DISK_CHUNKS + 8))
    try:
        engine = PatternEngine(cache)
        served = serve_all(engine, whole_chunks(remaining))
        wait_until(lambda: not cache.stats().loads_inflight, "a load is left over")
        cache.check_integrity()
        assert not any(tier.counters.corrupt_shards for tier in cache.stats().tiers)
    finally:
        cache.close()
    return served


def serve_all(engine: PatternEngine, certain: set[ChunkKey]) -> int:
    """Load every chain; what is certain to be on disk comes, as far as nothing is missing above."""
    served = 0
    for number in range(CHAINS):
        keys = engine.match(chain(number)).sequence.chunk_keys
        count = next((i for i, key in enumerate(keys) if key not in certain), len(keys))

        def found(number: int = number, count: int = count) -> bool:
            return len(engine.match(chain(number)).hits) >= count

        wait_until(found, f"chain {number}: {count} chunks are on disk, and not all are found")
        match = engine.match(chain(number))
        tokens = engine.load(match)
        chunks = tokens // match.sequence.chunk_tokens
        assert chunks >= count, f"chain {number}: {count} chunks are on disk, {chunks} served"
        served += chunks
    return served


@pytest.mark.parametrize("directories", [1, 2])
def test_b66_kill_9_leaves_what_was_written_and_nothing_wrong(
    host: KillHost, tmp_path: Path, rng: random.Random, scale: int, directories: int
) -> None:
    folders = tuple(str(tmp_path / f"disk{number}") for number in range(directories))
    served = leftovers = 0
    for number in range(ROUNDS * scale):
        job = drawn_job(rng, folders)
        remaining = host.kill(job, rng.randrange(1, REPORTS_MAX))
        leftovers += any(any(Path(folder, "incoming").iterdir()) for folder in folders)
        if number % COMMAND_EVERY == 0:
            verify_by_command(folders)
        served += check_round(job, remaining)
    assert served > ROUNDS * scale, "hardly anything was on disk"
    report(
        "killed while storing",
        scale,
        directories=directories,
        kills=ROUNDS * scale,
        in_a_write=leftovers,
        served_chunks=served,
    )
