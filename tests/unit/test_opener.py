"""The upkeep of one directory, turn by turn: what comes first, and what is out once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.below import opener as opener_module
from kvtier.cache.below.opener import VolumeOpener, save_epochs_everywhere
from kvtier.cache.executor import Executor
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.roots import Roots
from kvtier.config import Durability
from kvtier.constants import HEALTH_BACKOFF_S_MAX, READ_FAILURES_MAX
from kvtier.errors import TierUnavailableError
from kvtier.obs.stats import TierCounters
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileGate, FileOperation
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume


class Upkeep:
    """An opener with everything that it works for; nothing happens but in ``turn``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = FaultyFiles()
        self.clock = FakeClock()
        self.lock = threading.Lock()
        self.epochs = Epochs()
        self.roots = Roots(self.epochs, 1, set)
        self.counters = TierCounters()
        self.opened = 0
        shard_files = ShardFiles(str(root), Durability.NONE, self.files)
        self.volume = Volume(0, shard_files, 1 << 20, self.clock)
        disk = DiskTier([self.volume], LRU, self.clock, lambda _: None)
        self.executor = Executor(
            self.clock, read_threads=2, lanes=1, tick=lambda: None, tick_s=60.0
        )
        self.executor.start()
        self.opener = VolumeOpener(
            disk,
            self.volume,
            self.executor,
            self.lock,
            self.counters,
            self.epochs,
            self.roots,
            self.clock,
            Durability.NONE,
            self._count_open,
        )

    def _count_open(self) -> None:
        self.opened += 1

    def turn(self) -> None:
        with self.lock:
            self.opener.tick()

    def state(self) -> str:
        with self.lock:
            return self.volume.state[0]

    def until_open(self) -> None:
        self.turn()
        wait_until(lambda: self.state() == "ok", "it does not open")

    def fail_reads(self) -> None:
        with self.lock:
            for _ in range(READ_FAILURES_MAX):
                self.volume.read_failed(OSError(errno.EIO, "Input/output error"))
        self.clock.advance(HEALTH_BACKOFF_S_MAX)

    def reads(self) -> int:
        return sum(
            call.operation is FileOperation.READ and call.path.endswith("lock")
            for call in self.files.calls
        )


@pytest.fixture
def upkeep(tmp_path: Path) -> Iterator[Upkeep]:
    made = Upkeep(tmp_path / "disk")
    yield made
    made.files.inject()
    made.executor.close(10.0, [made.opener.finish])
    made.opener.close()


def test_it_opens_once_and_tells(upkeep: Upkeep) -> None:
    for _ in range(3):
        upkeep.turn()
    wait_until(lambda: upkeep.state() == "ok", "it does not open")
    assert upkeep.opened == 1
    assert upkeep.volume.accepts, "nothing was there that an index could have missed"


def test_an_open_that_fails_is_tried_again_after_a_while(upkeep: Upkeep) -> None:
    upkeep.root.write_text("in the way")
    upkeep.turn()
    wait_until(lambda: upkeep.state() != "opening", "it opens a file")
    upkeep.root.unlink()
    upkeep.turn()
    assert upkeep.state() != "ok"
    upkeep.clock.advance(HEALTH_BACKOFF_S_MAX)
    upkeep.until_open()


def test_a_directory_is_swept_before_anything_is_written(upkeep: Upkeep) -> None:
    upkeep.until_open()
    with upkeep.lock:
        upkeep.volume.open_failed(OSError(errno.EIO, "again"))
        upkeep.volume.opened = False
    upkeep.clock.advance(HEALTH_BACKOFF_S_MAX)
    upkeep.until_open()
    assert upkeep.opened == 2
    assert [upkeep.volume.accepts] == [False]
    upkeep.files.inject(FileFailure(operations=(FileOperation.LIST,), path="shards"))
    upkeep.turn()
    wait_until(lambda: upkeep.state() == "failing", "a sweep that fails shows in no state")
    upkeep.clock.advance(HEALTH_BACKOFF_S_MAX)
    upkeep.turn()
    wait_until(lambda: upkeep.volume.swept, "it is not swept again")


def test_an_epoch_is_saved_in_its_turn(upkeep: Upkeep) -> None:
    upkeep.until_open()
    with upkeep.lock:
        upkeep.epochs.advance(b"n" * 32)
    upkeep.turn()
    wait_until((upkeep.root / "epochs").exists, "the epoch is not saved")
    wait_until(lambda: not upkeep.epochs.unsaved(0), "it is not known to be saved")


def test_failed_reads_are_probed_until_one_works(upkeep: Upkeep) -> None:
    upkeep.until_open()
    upkeep.turn()
    assert upkeep.reads() == 0, "nothing has failed"
    upkeep.fail_reads()
    upkeep.files.inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
    upkeep.turn()
    wait_until(lambda: upkeep.reads() == 1, "no probe")
    wait_until(lambda: not upkeep.volume.readable, "a probe that failed counts")
    upkeep.turn()
    assert upkeep.reads() == 1, "not before it is due again"
    upkeep.files.inject()
    upkeep.clock.advance(HEALTH_BACKOFF_S_MAX)
    upkeep.turn()
    wait_until(lambda: upkeep.state() == "ok", "a probe that works heals")
    assert upkeep.reads() == 2


def test_b96_a_probe_that_hangs_is_the_only_one_and_holds_up_nothing(
    upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener_module, "EPOCHS_WAIT_S_MAX", 0.01)
    upkeep.until_open()
    upkeep.fail_reads()
    gate = FileGate(operations=(FileOperation.READ,))
    upkeep.files.inject(gate)
    upkeep.turn()
    gate.wait_for_arrivals()
    wait_until(lambda: upkeep.state() == "slow", "its deadline is not kept")
    for _ in range(5):
        upkeep.clock.advance(HEALTH_BACKOFF_S_MAX)
        upkeep.turn()
    with upkeep.lock:
        upkeep.epochs.advance(b"n" * 32)
    upkeep.turn()
    wait_until(lambda: not upkeep.epochs.unsaved(0), "the epoch waits for the probe")
    assert upkeep.reads() == 1
    gate.open()
    wait_until(lambda: upkeep.state() == "ok", "the late answer is none")
    assert upkeep.reads() == 1


def test_b11_one_that_is_away_keeps_no_epoch_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[str] = []

    def save(opener: VolumeOpener) -> None:
        if opener is away:
            raise TierUnavailableError("it is away")
        saved.append("here")

    monkeypatch.setattr(VolumeOpener, "save_epochs", save)
    away, here, also = (object.__new__(VolumeOpener) for _ in range(3))
    with pytest.raises(TierUnavailableError, match="away"):
        save_epochs_everywhere([away, here, also])
    assert saved == ["here", "here"]
    save_epochs_everywhere([here])
