"""The disk below a running server fails and comes back; its clients only see right answers."""

from __future__ import annotations

import http.client
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.constants import GIB, LOAD_CHUNKS_INFLIGHT_MIN, MIB, READ_FAILURES_MAX
from kvtier.testing.fault_files import FaultyFiles, FileGate, FileOperation
from tests.lib.assembly import assembled
from tests.lib.disk_folder import shard_files
from tests.lib.mounts import Disk, removable_disk
from tests.lib.prompts import tale
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, Answer, Served, idle, series, serving

CHUNK = 16
PROMPT_TOKENS = CHUNK * 4 + 8
#: Three of these are more than HBM or DRAM hold.
FILLER_TOKENS = 500
NEW_TOKENS = 4
ROOMY = GIB
SMALL = ["--kv-bytes=24MiB", "--dram=64MiB", f"--chunk-tokens={CHUNK}"]
OK = series("tier_ok", tier="disk")
WRITTEN = series("tier_written_bytes_total", tier="disk")
FAULTS = series("tier_io_errors_total", tier="disk")


@dataclass
class Bench:
    """A server whose disk a test may take away. ``at_start`` is how that was told at first."""

    served: Served
    disk: Disk
    rng: random.Random
    at_start: str = ""
    tally: Tally = field(default_factory=Tally)

    def ask(self, prompt: tuple[int, ...] | None = None) -> Answer:
        """Ask something new, or the prompt, and check the answer."""
        answer = self.served.ask(prompt or tale(self.rng, PROMPT_TOKENS), NEW_TOKENS)
        assert len(answer.tokens) == NEW_TOKENS
        self.tally.check(answer.prompt, answer.tokens)
        return answer

    def plug_in(self) -> None:
        """Mount an empty disk where a file took its place."""
        self.disk.place.unlink()
        self.disk.place.mkdir()
        self.disk.plug_in(ROOMY)

    def expect_degraded(self, state: str) -> str:
        """Check that the server says so and goes on; return the detail."""
        disk = self.served.wait_for_disk(state)
        status, _ = self.served.get("/health")
        assert status == http.client.OK
        assert self.served.health()["status"] == "degraded"
        metrics = self.served.metrics()
        assert metrics[OK] == 0
        assert metrics[series("degraded")] == 1
        self.ask()
        return str(disk["detail"])

    def expect_well(self) -> None:
        """Check that the tier comes back by itself, takes in new chunks and is idle then."""
        self.served.wait_until(lambda seen: seen[OK] == 1)
        before = self.served.wait_until(idle)[WRITTEN]
        self.ask()
        self.served.wait_until(lambda seen: seen[WRITTEN] > before)
        self.served.wait_until(idle)
        assert self.served.health()["status"] == "ok"


@pytest.fixture(scope="module")
def started_without_a_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    place = tmp_path_factory.mktemp("disk") / "place"
    place.write_text("a file where the disk should be mounted")
    with removable_disk(place) as disk:
        options = [*SMALL, f"--disk={disk.folder}", f"--disk-bytes={ROOMY}"]
        with serving(*options, LOAD_ALWAYS) as served:
            bench = Bench(served, disk, random.Random(5))
            bench.at_start = bench.expect_degraded("missing")
            bench.plug_in()
            yield bench
            assert served.stop() == 0


@pytest.fixture
def bench(started_without_a_disk: Bench) -> Iterator[Bench]:
    """The server, well, with a disk that it has opened; few ties after the test."""
    bench = started_without_a_disk
    bench.expect_well()
    yield bench
    bench.tally.assert_few_ties()


def test_a_disk_that_is_missing_at_the_start(bench: Bench) -> None:
    assert str(bench.disk.folder) in bench.at_start


def test_a_disk_that_is_taken_away(bench: Bench) -> None:
    bench.disk.pull_out()
    bench.disk.place.rmdir()
    bench.disk.place.write_text("nothing is mounted")
    bench.ask()
    bench.expect_degraded("missing")
    bench.plug_in()
    bench.expect_well()
    # What the old disk held is forgotten.
    chunks = bench.served.metrics()[series("tier_chunks", tier="disk")]
    assert chunks == len(shard_files(bench.disk.folder))


def test_a_directory_that_is_removed(bench: Bench) -> None:
    shutil.rmtree(bench.disk.folder)
    bench.ask()
    bench.expect_well()
    chunks = bench.served.metrics()[series("tier_chunks", tier="disk")]
    assert 0 < chunks == len(shard_files(bench.disk.folder))


def test_b110_a_disk_that_is_full(bench: Bench) -> None:
    before = bench.served.metrics()
    held = sum(path.stat().st_size for path in shard_files(bench.disk.folder))
    bench.disk.resize(held + 2 * MIB)
    for _ in range(2):
        bench.ask()
    detail = bench.expect_degraded("full")
    assert "space" in detail
    assert bench.served.metrics()[FAULTS] > before[FAULTS]
    bench.disk.resize(ROOMY)
    bench.expect_well()


def test_a_disk_that_is_read_only(bench: Bench) -> None:
    prompt = tale(bench.rng, PROMPT_TOKENS)
    bench.ask(prompt)
    bench.served.wait_until(idle)
    bench.disk.write_protect()
    bench.ask()
    detail = bench.expect_degraded("read_only")
    assert "Read-only" in detail
    # Enough to push the prompt out of HBM and DRAM; it can still be read.
    for _ in range(3):
        bench.served.ask(tale(bench.rng, FILLER_TOKENS), 1)
    read = series("tier_read_bytes_total", tier="disk")
    before = bench.served.metrics()[read]
    # While it waits for room, it is brought up into DRAM, from where it counts.
    assert sum(bench.ask(prompt).cached.values()) > 0
    assert bench.served.metrics()[read] > before
    bench.disk.pull_out()
    bench.expect_well()


async def test_a_disk_that_hangs(tmp_path: Path, rng: random.Random) -> None:
    options = [*SMALL, f"--disk={tmp_path}/kv"]
    prompts = [tale(rng, PROMPT_TOKENS) for _ in range(READ_FAILURES_MAX)]
    later = [tale(rng, PROMPT_TOKENS) for _ in range(12)]
    tally = Tally()
    async with assembled(*options) as served:
        await served.wait_for_disk("ok")
        for prompt in [*prompts, *later]:
            await served.ask(prompt, NEW_TOKENS)
        await served.wait_until(idle)
    files = FaultyFiles()
    async with assembled(*options, files=files) as served:
        await served.wait_for_disk("ok")
        gate = FileGate(operations=(FileOperation.READ,))
        files.inject(gate)
        for prompt in prompts:
            answer = await served.ask(prompt, NEW_TOKENS)
            assert sum(answer.cached.values()) == 0
            tally.check(prompt, answer.tokens)
        disk = await served.wait_for_disk("slow")
        assert disk["detail"]
        metrics = await served.metrics()
        assert metrics[series("late_jobs")] >= LOAD_CHUNKS_INFLIGHT_MIN
        # Computing was quicker than waiting for the deadline.
        missed = series("tier_miss_tokens_total", tier="disk", reason="cost")
        assert metrics[missed] > 0
        gate.open()
        await served.wait_until(lambda seen: seen[series("late_jobs")] == 0)
        # It is tried again with a request, some time after it was given up.
        for prompt in later:
            answer = await served.ask(prompt, NEW_TOKENS)
            tally.check(prompt, answer.tokens)
            if answer.cached["disk"]:
                break
        assert answer.cached["disk"]
        await served.wait_for_disk("ok")
        assert idle(await served.metrics())
    tally.assert_few_ties()
