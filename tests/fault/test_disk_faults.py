"""The disk fails at every call in turn, dies at every call, loses power, hangs.

Whatever happens: no wrong byte is served, the books agree, the bound holds, and once the fault is
over everything works again.
"""

from __future__ import annotations

import errno
import functools
import math
import queue
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.executor import Executor
from kvtier.config import Durability
from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.errors import DeadlineError
from kvtier.testing.fault_files import (
    ALL_OPERATIONS,
    EVER,
    FaultyFiles,
    FileCrash,
    FileFailure,
    FileGate,
    FileOperation,
    TornWrite,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.testing.power_cut import PowerCutFiles
from tests.lib.disk_lab import CODEC, NAMESPACE, BoundedFiles, DiskLab, bytes_on_disk, files_below

CHUNKS = 4


class History:
    """A lab, and which chunks were reported as written and not as evicted since."""

    def __init__(
        self, lab: DiskLab, faulty: FaultyFiles, durability: Durability = Durability.NONE
    ) -> None:
        self.lab = lab
        self.faulty = faulty
        self.durable: set[object] = set()
        self._written: set[object] = set()
        self._durability = durability

    def write(self, name: object, parent: object | None = None) -> None:
        if not self.lab.tier.writable():
            self.lab.clock.advance(HEALTH_BACKOFF_S_MAX)
        absent = self.lab.tier.opened and not self.lab.tier.holds(chunk_key(name))
        if absent and self.lab.write(name, parent):
            self._written.add(name)
        if self._durability is Durability.EACH:
            self.durable |= self._written
        gone = {n for n in self._written if self.lab.holds(n) == [False]}
        self._written -= gone
        self.durable -= gone
        self.lab.tier.check_integrity()

    def commit_group(self) -> None:
        try:
            self.lab.shard_files.commit_group()
        except OSError as error:
            self.lab.volume.write_failed(error)
        else:
            self.durable |= self._written

    def run(self) -> None:
        """Open, write more than fits, read, lose a chunk, write it again, come back."""
        lab = self.lab
        lab.open()
        for name, parent in ((0, None), (1, 0), (2, 1), ("x", None), ("y", "x"), (3, 2)):
            self.write(name, parent)
        self.commit_group()
        for name in (0, 1, 2, 3, "x", "y"):
            lab.read(name)
        if lab.holds(1) == [True]:
            path = lab.path_of(1)
            data = bytearray(path.read_bytes())
            data[-4096] ^= 1
            path.write_bytes(data)
            self._written.discard(1)
            self.durable.discard(1)
            lab.read(1)
        self.write(1, 0)
        self.write("z")
        lab.do_chores()
        self.commit_group()
        lab.open()
        for name in (0, 1, "z"):
            lab.read(name)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One folder for thousands of small ones, in memory where the system has such a place."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvtier-faults-", dir=memory) as made:
        yield Path(made)


def fresh(folder: Path, durability: Durability = Durability.NONE) -> History:
    root = tempfile.mkdtemp(dir=folder)
    probe = DiskLab(root, chunks=CHUNKS, shards=2)
    faulty = FaultyFiles(BoundedFiles(root, probe.capacity_bytes))
    lab = DiskLab(root, chunks=CHUNKS, shards=2, files=faulty, durability=durability)
    return History(lab, faulty, durability)


def calls_of_a_run(folder: Path, durability: Durability = Durability.NONE) -> int:
    history = fresh(folder, durability)
    history.run()
    history.lab.check()
    assert history.lab.corrupt == 1
    history.lab.close()
    return len(history.faulty.calls)


def check_well_again(history: History) -> None:
    """After the fault everything is as if it had never been, except for what was lost."""
    lab = history.lab
    lab.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert lab.open()
    lab.check()
    for name, parent in ((0, None), (1, 0), (2, 1)):
        # What was spoiled on purpose may be there still; one read finds it out.
        if not lab.read(name):
            assert lab.write(name, parent)
        assert lab.read(name)
    assert lab.tier.state == ("ok", "")
    lab.check()


@pytest.mark.parametrize("last", [None, EVER], ids=["once", "for ever"])
@pytest.mark.parametrize(
    ("durability", "code"),
    [
        (Durability.NONE, errno.ENOSPC),
        (Durability.NONE, errno.EIO),
        (Durability.NONE, errno.EROFS),
        (Durability.NONE, errno.ENOENT),
        (Durability.EACH, errno.EIO),
    ],
)
def test_every_call_fails_in_turn(
    folder: Path, code: int, last: int | None, durability: Durability
) -> None:
    for nth in range(1, calls_of_a_run(folder, durability) + 1):
        history = fresh(folder, durability)
        fault = FileFailure(operations=ALL_OPERATIONS, nth=nth, last=last, errno=code)
        history.faulty.inject(fault)
        history.run()
        history.lab.tier.check_integrity()
        assert bytes_on_disk(history.lab.root) <= history.lab.capacity_bytes
        history.faulty.inject()
        check_well_again(history)
        history.lab.close()


@pytest.mark.parametrize("nbytes", [0, 512, 12288])
def test_every_write_is_torn_in_turn(folder: Path, nbytes: int) -> None:
    history = fresh(folder)
    history.run()
    count = history.faulty.count(FileOperation.CREATE)
    history.lab.close()
    for nth in range(1, count + 1):
        history = fresh(folder)
        cannot_remove = FileFailure(operations=(FileOperation.REMOVE,), path="incoming", last=2)
        history.faulty.inject(TornWrite(nth=nth, nbytes=nbytes, errno=errno.ENOSPC), cannot_remove)
        history.run()
        assert bytes_on_disk(history.lab.root) <= history.lab.capacity_bytes
        history.faulty.inject()
        check_well_again(history)
        history.lab.close()


@pytest.mark.parametrize("nbytes", [None, 512, 12288])
def test_b66_every_call_may_be_the_last_of_its_process(folder: Path, nbytes: int | None) -> None:
    for nth in range(1, calls_of_a_run(folder) + 1):
        history = fresh(folder)
        history.faulty.inject(FileCrash(nth=nth, nbytes=nbytes))
        history.run()
        history.faulty.restart()
        lab = history.lab
        # Most damage is done on purpose, at one place; the crash does none.
        before = lab.corrupt
        assert lab.restart()
        assert not files_below(lab.root, "incoming")
        assert lab.corrupt == before
        lab.check()
        check_well_again(history)
        lab.close()


@pytest.mark.parametrize("durability", list(Durability))
def test_power_fails_at_every_call(folder: Path, durability: Durability, seed: int) -> None:
    """``each`` and ``batch`` keep what they promised; nobody serves what was torn."""
    lost = 0
    for nth in range(1, calls_of_a_run(folder, durability) + 1):
        root, shadow = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(2))
        power = PowerCutFiles(root, shadow, seed=seed + nth)
        faulty = FaultyFiles(power)
        lab = DiskLab(root, chunks=CHUNKS, shards=2, files=faulty, durability=durability)
        history = History(lab, faulty, durability)
        faulty.inject(FileCrash(nth=nth))
        history.run()
        power.cut()
        faulty.restart()
        assert lab.restart()
        assert lab.do_chores()
        lab.tier.check_integrity()
        kept = {name for name in history.durable if lab.read(name)}
        if durability is Durability.NONE:
            lost += history.durable != kept
        else:
            assert kept == history.durable, f"power at call {nth}: a promise was broken"
        check_well_again(history)
        lab.close()
    assert (lost > 0) == (durability is Durability.NONE), "the cut must be able to lose something"


MORTALS = """
import os, signal, sys
from kvtier.testing.policy_machine import chunk_key
from tests.lib.disk_lab import BoundedFiles, DiskLab

class Mortal(BoundedFiles):
    def __init__(self, root, capacity_bytes, calls, nbytes):
        super().__init__(root, capacity_bytes)
        self.calls, self.nbytes = calls, nbytes

    def step(self, path=None, data=None):
        self.calls -= 1
        if self.calls == 0:
            if data is not None:
                with open(path, "xb") as file:
                    file.write(data[: self.nbytes])
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path, data):
        self.step(path, data)
        super().create(path, data)

    def replace(self, source, target):
        self.step()
        super().replace(source, target)

    def remove(self, path):
        self.step()
        super().remove(path)

def live(root, first, calls, nbytes):
    capacity_bytes = DiskLab(root, chunks=4, shards=2).capacity_bytes
    lab = DiskLab(root, chunks=4, shards=2, files=Mortal(root, capacity_bytes, calls, nbytes))
    assert lab.open()
    for name in range(first, first + 100):
        if lab.tier.holds(chunk_key(name)):
            continue  # Half of it was written when the last process ended.
        parent = name - 1 if name % 3 and lab.holds(name - 1) == [True] else None
        if lab.write(name, parent):
            print(name, flush=True)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        live(sys.argv[1], *map(int, line.split()))
        os._exit(3)
    status = os.waitpid(pid, 0)[1]
    print("killed" if os.WIFSIGNALED(status) else "alive", flush=True)
"""


def test_b66_b69_kill_9_in_the_middle_of_writes(
    tmp_path: Path, rng: random.Random, scale: int
) -> None:
    """Each process dies at a system call that the seed chooses; the directory lives on."""
    lab = DiskLab(tmp_path, chunks=4, shards=2)
    first = 0
    with subprocess.Popen(
        [sys.executable, "-c", MORTALS, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as mortals:
        assert mortals.stdin is not None
        assert mortals.stdout is not None
        for _ in range(20 * scale):
            before = {path: path.read_bytes() for path in files_below(tmp_path, "shards")}
            calls, nbytes = rng.randrange(1, 40), rng.choice((0, 512, 4096, 9000))
            mortals.stdin.write(f"{first} {calls} {nbytes}\n")
            mortals.stdin.flush()
            written: list[int] = []
            while (line := mortals.stdout.readline().strip()) not in ("killed", "alive", ""):
                written.append(int(line))
            assert line == "killed"
            assert lab.restart()
            assert lab.corrupt == 0, "torn under its final name"
            lab.check()
            for path, data in before.items():
                assert not path.exists() or path.read_bytes() == data, "an old file was written to"
            if written:
                assert lab.read(written[-1]), "the last one reported is there"
                first = written[-1] + 1
            for name in range(first):
                lab.read(name)
            assert lab.corrupt == 0
            lab.close()
    assert first > 20


Outcomes = queue.SimpleQueue[object]


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[DiskLab, FaultyFiles, Executor]]:
    faulty = FaultyFiles()
    lab = DiskLab(tmp_path, chunks=CHUNKS, files=faulty)
    executor = Executor(lab.clock, read_threads=2, lanes=1, tick=lambda: None, tick_s=60.0)
    executor.start()
    lab.open()
    for name in ("slow", "fast"):
        assert lab.write(name)
    yield lab, faulty, executor
    executor.close(10.0)
    lab.check()
    lab.close()


def test_a_hung_write_holds_up_no_read(hanging: tuple[DiskLab, FaultyFiles, Executor]) -> None:
    lab, faulty, executor = hanging
    gate = FileGate(operations=(FileOperation.CREATE,))
    faulty.inject(gate)
    done, late, read = Outcomes(), Outcomes(), Outcomes()
    target = lab.tier.reserve(lab.entry("new"), NAMESPACE, CODEC, lab.sizes)
    assert target is not None
    now = lab.clock.now()
    executor.write(0, lambda: lab.write_files(target), done.put, deadline=now, late=late.put)
    gate.wait_for_arrivals()
    overdue = done.get(timeout=30)
    assert isinstance(overdue, DeadlineError)
    lab.volume.write_failed(overdue)
    assert lab.tier.state[0] == "slow"
    assert lab.tier.readable()
    for name in ("slow", "fast"):
        read_it = functools.partial(lab.read, name)
        executor.read(0, read_it, read.put, deadline=math.inf, late=late.put)
        assert read.get(timeout=30) is True
    assert lab.tier.index.ready(chunk_key("new")) is None
    gate.open()
    assert late.get(timeout=30) is None
    lab.tier.commit(target)
    assert lab.tier.state == ("ok", "")
    assert lab.read("new")


def test_a_hung_read_holds_up_no_other_read_and_no_write(
    hanging: tuple[DiskLab, FaultyFiles, Executor],
) -> None:
    lab, faulty, executor = hanging
    gate = FileGate(operations=(FileOperation.READ,), path=lab.path_of("slow").name)
    faulty.inject(gate)
    done, late = Outcomes(), Outcomes()
    now = lab.clock.now()
    executor.read(0, lambda: lab.read("slow"), done.put, deadline=now, late=late.put)
    gate.wait_for_arrivals()
    assert isinstance(done.get(timeout=30), DeadlineError)
    executor.read(0, lambda: lab.read("fast"), done.put, deadline=math.inf, late=late.put)
    assert done.get(timeout=30) is True
    executor.write(0, lambda: lab.write("new"), done.put, deadline=math.inf, late=late.put)
    assert done.get(timeout=30) is True
    # What is read stays, whoever wants its place.
    for name in range(2 * CHUNKS):
        assert lab.write(name)
    assert lab.holds("slow") == [True]
    gate.open()
    assert late.get(timeout=30) is True
