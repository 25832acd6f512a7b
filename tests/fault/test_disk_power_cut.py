"""Power is lost again and again in random histories of one directory; promises are kept.

``none`` promises that nothing wrong is served, ``batch`` what the last group commit took, ``each``
whatever was reported as written. One seed decides a history; KVTIER_SEED replays it.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.below.encoder import ChunkEncoder
from kvtier.codecs.zstd import ZstdCodec
from kvtier.config import Durability
from kvtier.constants import HEALTH_BACKOFF_S_MAX, JOURNAL_CHANGES_LOGGED
from kvtier.testing.fault_files import FaultyFiles, FileCrash
from kvtier.testing.policy_machine import chunk_key
from kvtier.testing.power_cut import PowerCutFiles
from kvtier.tiers.disk import journal
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Problem, Verifier
from tests.lib.disk_lab import DiskLab
from tests.lib.soak_report import report

CHUNKS = 6
NAMES = 16
CHAIN = 4
STORIES = 30
LIVES = 4
STEPS_MAX = 30
#: A cut may undo a removal, so an older file or a child without its parent may be there again.
HARMLESS = {Problem.LEFTOVER, Problem.ORPHAN, Problem.TWIN}


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvtier-power-", dir=memory) as made:
        yield Path(made)


class Story:
    """A directory through several lives, each ended by a cut between or within calls."""

    def __init__(
        self, folder: Path, seed: int, durability: Durability, power: type[PowerCutFiles]
    ) -> None:
        self.draws = random.Random(seed)
        self.durability = durability
        root, shadow = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(2))
        # A cut may undo removals, so that more lies there than the bound until the next open.
        self.power = power(root, shadow, seed=seed)
        self.faulty = FaultyFiles(self.power)
        self.lab = DiskLab(
            root,
            chunks=CHUNKS,
            shards=2,
            files=self.faulty,
            durability=durability,
            encoder=ChunkEncoder(ZstdCodec()) if seed % 2 else None,
        )
        self.written: set[int] = set()
        self.promised: set[int] = set()
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        self.lab.open()
        for _ in range(LIVES):
            if self.draws.random() < 0.5:  # Within a call, which may leave a part of a file.
                nbytes = self.draws.choice((None, 0, 100, 4096))
                self.faulty.inject(FileCrash(nth=self.draws.randrange(1, 150), nbytes=nbytes))
            for _ in range(self.draws.randrange(1, STEPS_MAX)):
                self.step()
            self.cut()
        self.lab.close()

    def step(self) -> None:
        way, name = self.draws.random(), self.draws.randrange(NAMES)
        if way < 0.6:
            self.write(name)
        elif way < 0.7:
            self.lab.read(name)
        elif way < 0.8:
            self.lab.touch(name)
        elif way < 0.9:
            self.lab.do_chores()
        else:
            self.commit_group()
        self.forget_what_left()

    def write(self, name: int) -> None:
        parent = name - 1 if name % CHAIN else None
        self.lab.clock.advance(HEALTH_BACKOFF_S_MAX)
        if not self.lab.tier.holds(chunk_key(name)) and self.lab.write(name, parent):
            self.written.add(name)
            if self.durability is Durability.EACH:
                self.promised.add(name)

    def commit_group(self) -> None:
        try:
            self.lab.shard_files.commit_group()
        except OSError as error:
            self.lab.volume.write_failed(error)
        else:
            if self.durability is Durability.BATCH:
                self.promised |= self.written

    def forget_what_left(self) -> None:
        for names in (self.written, self.promised):
            names -= {name for name in names if self.lab.holds(name) == [False]}

    def cut(self) -> None:
        """Lose the power, look at what is there, come back and hold it against the promises."""
        self.seen["cut within a call"] += self.faulty.crashed
        self.lab.close()
        self.power.cut()
        self.faulty.restart()
        self.verify()
        lost, promised = self.written - self.promised, set(self.promised)
        assert self.lab.restart()
        for name in sorted(promised):
            assert self.lab.read(name), f"{name} was promised and is lost"
        self.seen["kept"] += len(promised)
        self.seen["lost"] += sum(not self.lab.read(name) for name in sorted(lost))
        for name in range(NAMES):
            self.lab.read(name)  # Asserts that its bytes are right, if it is there.
        self.lab.check()
        self.seen["corrupt"] += self.lab.corrupt
        self.forget_what_left()

    def verify(self) -> None:
        verifier = Verifier([self.lab.root], LocalFiles())
        for _ in verifier.run():
            pass
        found = {finding.problem for finding in verifier.verdict.findings}
        torn = set() if self.durability is Durability.EACH else {Problem.CORRUPT}
        assert found <= HARMLESS | torn, verifier.verdict.findings


def tell(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seeds: range,
    durability: Durability,
    power: type[PowerCutFiles] = PowerCutFiles,
) -> Counter[str]:
    """Run stories; every other one has its index folded all the time."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        often = 2 if seed % 2 else JOURNAL_CHANGES_LOGGED
        monkeypatch.setattr(journal, "JOURNAL_CHANGES_LOGGED", often)
        story = Story(folder, seed, durability, power)
        try:
            story.run()
        except AssertionError as error:
            error.add_note(f"story of seed {seed}; the same KVTIER_SEED replays it")
            raise
        seen += story.seen
    return seen


@pytest.mark.parametrize("durability", list(Durability))
def test_b66_whenever_power_is_cut_promises_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, scale: int, durability: Durability
) -> None:
    seen = tell(folder, monkeypatch, range(seed, seed + STORIES * scale), durability)
    assert seen["cut within a call"]
    assert bool(seen["kept"]) == (durability is not Durability.NONE)
    assert bool(seen["lost"]) == (durability is not Durability.EACH)
    assert bool(seen["corrupt"]) == (durability is not Durability.EACH)
    cuts = STORIES * LIVES * scale
    report("power cut", scale, cuts=cuts, **{word.replace(" ", "_"): n for word, n in seen.items()})


class ForgetsNames(PowerCutFiles):
    """A disk that does not keep names, whatever it says."""

    def sync_directory(self, path: str) -> None:
        del path


class ForgetsBytes(PowerCutFiles):
    """A disk that does not keep the bytes of shards, whatever it says."""

    def sync_file(self, path: str) -> None:
        if "/index/" in path:
            super().sync_file(path)


@pytest.mark.parametrize("power", [ForgetsNames, ForgetsBytes])
@pytest.mark.parametrize("durability", [Durability.BATCH, Durability.EACH])
def test_the_canary_dies(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    durability: Durability,
    power: type[PowerCutFiles],
) -> None:
    with pytest.raises(AssertionError, match=r"was promised and is lost|CORRUPT"):
        tell(folder, monkeypatch, range(seed, seed + STORIES), durability, power)
