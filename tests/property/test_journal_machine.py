"""The index at rest under any order of changes, faults, kills and power cuts.

Whatever happens, a load gives a state that the index had at the last sync or later; what was
appended and not cut off by a power failure is never missing.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtier.testing.fault_files import (
    ALL_OPERATIONS,
    FaultyFiles,
    FileCrash,
    FileFailure,
    FileOperation,
    TornWrite,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.testing.power_cut import PowerCutFiles
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Changes, Journal
from kvtier.tiers.disk.rows import Row, Rows
from tests.lib.index_model import KINDS, State, after, make_row, state_of

# In memory where the system has such a place: thousands of small files are written.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
NAMES = strategies.integers(0, 7)
GENERATIONS = strategies.integers(1, 3)
ROWS = strategies.builds(
    make_row,
    NAMES,
    strategies.none() | NAMES,
    generation=GENERATIONS,
    used_ms=strategies.integers(0, 99),
    kind=strategies.sampled_from(KINDS),
    position=strategies.integers(0, 9),
)
CHANGES = strategies.builds(
    Changes,
    strategies.lists(ROWS, max_size=3).map(tuple),
    strategies.lists(strategies.tuples(NAMES.map(chunk_key), GENERATIONS), max_size=2).map(tuple),
    strategies.lists(NAMES.map(chunk_key), max_size=4).map(tuple),
    strategies.integers(100, 999),
)


class JournalMachine(RuleBasedStateMachine):
    """``now`` holds what a load may give after a kill, ``since_sync`` what else after a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-journal-", dir=MEMORY))
        for name in ("root", "shadow"):
            (self.folder / name).mkdir()
        self.power = PowerCutFiles(self.folder / "root", self.folder / "shadow", seed=1)
        self.faulty = FaultyFiles(self.power, seed=1)
        self.now: set[State] = {()}
        self.since_sync: set[State] = {()}
        self.open()
        self.journal.start(Rows.of([]))
        self.started = True

    def open(self) -> None:
        self.journal = Journal(str(self.folder / "root"), self.faulty)

    def restart(self) -> None:
        """Come back in a new process, on a disk that is well."""
        self.faulty.restart()
        self.open()
        state = state_of(self.journal.load())
        assert state is not None
        assert state in self.now
        self.now = {state}
        self.started = True

    @rule(changes=CHANGES)
    def append(self, changes: Changes) -> None:
        later = {after(state, changes) for state in self.now}
        try:
            self.journal.append(changes)
        except OSError:
            later |= self.now
        else:
            assert self.started, "a state that nobody wrote"
        self.since_sync |= later
        self.now = later

    @rule(rows=strategies.lists(ROWS, max_size=4, unique_by=lambda row: row.key))
    def start(self, rows: list[Row]) -> None:
        try:
            self.journal.start(Rows.of(rows))
        except OSError:
            self.started = False
            self.now = self.now | {tuple(rows)}
            self.since_sync |= self.now
        else:
            self.started = True
            self.now, self.since_sync = {tuple(rows)}, {tuple(rows)}

    @rule()
    def compact(self) -> None:
        try:
            self.journal.compact()
        except OSError:
            return
        self.started = True
        self.since_sync = set(self.now)

    @rule()
    def sync(self) -> None:
        try:
            self.journal.sync()
        except OSError:
            return
        if self.started:
            self.since_sync = set(self.now)

    @rule()
    def kill(self) -> None:
        self.restart()

    @rule()
    def cut_power(self) -> None:
        self.faulty.restart()
        self.power.cut()
        self.now = self.now | self.since_sync
        self.restart()
        self.since_sync = set(self.now)

    @rule(nth=strategies.integers(1, 8), last=strategies.sampled_from((None, 0)))
    def fail(self, nth: int, last: int | None) -> None:
        self.faulty.inject(FileFailure(operations=ALL_OPERATIONS, nth=nth, last=last))

    @rule(nth=strategies.integers(1, 8), nbytes=strategies.integers(0, 400))
    def crash(self, nth: int, nbytes: int) -> None:
        self.faulty.inject(FileCrash(operations=ALL_OPERATIONS, nth=nth, nbytes=nbytes))

    @rule(nth=strategies.integers(1, 3), nbytes=strategies.integers(0, 400))
    def tear(self, nth: int, nbytes: int) -> None:
        self.faulty.inject(TornWrite(operations=(FileOperation.APPEND,), nth=nth, nbytes=nbytes))

    @rule()
    def heal(self) -> None:
        self.faulty.inject()

    def teardown(self) -> None:
        self.restart()
        self.journal.compact()
        logs = sorted(p.name for p in (self.folder / "root" / "index").iterdir())
        assert logs == ["snapshot"], "what is not needed any more is gone"
        shutil.rmtree(self.folder)


JournalMachine.TestCase.settings = settings(stateful_step_count=30)
TestJournalMachine = JournalMachine.TestCase


class Written:
    """A directory with a snapshot and a log, and every state on the way."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.snapshot = root / "index" / "snapshot"
        first = tuple(make_row(n, n - 1, generation=n, kind=KINDS[n % 3]) for n in range(1, 9))
        self.states: list[State] = [first]
        journal = Journal(str(root), LocalFiles())
        journal.start(Rows.of(first))
        for n in range(20, 24):
            changes = Changes(
                (make_row(n, generation=n, kind=KINDS[n % 3]),),
                ((chunk_key(n - 18), n - 18), (chunk_key(1), 7)),
                (chunk_key(n - 12), chunk_key(1)),
                1000 + n,
            )
            journal.append(changes)
            self.states.append(after(self.states[-1], changes))
        (self.log,) = root.glob("index/log-*")

    def load(self) -> State | None:
        return state_of(Journal(str(self.root), LocalFiles()).load())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("index"))


@given(place=strategies.integers(0), bit=strategies.integers(0, 7))
def test_b78_a_flipped_bit_of_the_index_never_gives_a_wrong_row(
    written: Written, place: int, bit: int
) -> None:
    """In the snapshot it makes the index unknown, in the log it hides what follows."""
    for path, allowed in ((written.snapshot, [None]), (written.log, written.states[:-1])):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[place % len(data)] ^= 1 << bit
        path.write_bytes(data)
        try:
            found = written.load()
        finally:
            path.write_bytes(whole)
        padding = path is written.snapshot and 48 <= place % len(data) < 4096
        assert found in ([written.states[-1]] if padding else allowed)
    assert written.load() == written.states[-1]


def test_a_log_cut_anywhere_gives_the_batches_that_are_whole(written: Written) -> None:
    whole = written.log.read_bytes()
    seen: list[State] = []
    try:
        for length in [*range(0, len(whole), 7), len(whole)]:
            written.log.write_bytes(whole[:length])
            found = written.load()
            assert found is not None
            seen.append(found)
    finally:
        written.log.write_bytes(whole)
    assert [state for state, _ in itertools.groupby(seen)] == written.states


@given(data=strategies.binary(max_size=300), where=strategies.integers(0))
def test_random_bytes_are_never_believed(written: Written, data: bytes, where: int) -> None:
    for path in (written.snapshot, written.log):
        whole = path.read_bytes()
        start = where % len(whole)
        path.write_bytes(whole[:start] + data + whole[start + len(data) :])
        try:
            found = written.load()
        finally:
            path.write_bytes(whole)
        assert found is None or found in written.states
