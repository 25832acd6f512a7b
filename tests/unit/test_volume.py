"""The books of one directory: what is due there, what waits for how long, how it does."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvtier.config import Durability
from kvtier.constants import (
    HEALTH_BACKOFF_S_MIN,
    LATE_JOBS_MAX,
    QUARANTINE_FILES_MAX,
    READ_FAILURES_MAX,
    USED_KEYS_MAX,
    USED_NOTE_S,
    WRITES_INFLIGHT_MAX,
)
from kvtier.errors import DeadlineError, TierUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk import volume as volume_module
from kvtier.tiers.disk.rows import Kind, Row
from kvtier.tiers.disk.shard_files import DirectoryLostError, ShardFiles
from kvtier.tiers.disk.volume import DiskPlace, Volume, written
from kvtier.types import ShardId

KIND = Kind(b"n" * 32, "raw", ((ShardId(0, 0, 0), 4096), (ShardId(1, 0, 0), 8192)))


def row_of(name: object, generation: int = 7) -> Row:
    return Row(chunk_key(name), None, 0, KIND, generation, 1000)


def place_of(name: str, nbytes: int = 4096) -> DiskPlace:
    return DiskPlace(3, f"/somewhere/{name}", nbytes, 1)


def says(volume: Volume, question: str) -> object:
    """Ask a property by name: it may answer otherwise the next time."""
    return getattr(volume, question)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def volume(tmp_path: Path, files: FaultyFiles, clock: FakeClock) -> Iterator[Volume]:
    shard_files = ShardFiles(str(tmp_path), Durability.NONE, files)
    made = Volume(3, shard_files, 100_000, clock)
    assert says(made, "readable") is False
    assert says(made, "writable") is False
    assert made.state == ("opening", "reading the index")
    assert says(made, "open_due") is True
    made.take_up(shard_files.open())
    assert made.state == ("ok", "")
    yield made
    shard_files.close()


# Accesses


def test_an_access_is_noted_after_a_while(volume: Volume, clock: FakeClock) -> None:
    volume.note_used([chunk_key("a"), chunk_key("b")])
    assert says(volume, "chores_due") is False
    clock.advance(USED_NOTE_S / 2)
    volume.note_used([chunk_key("a")])
    assert says(volume, "chores_due") is False
    clock.advance(USED_NOTE_S / 2)
    assert says(volume, "chores_due") is True, "counted from the first one"
    assert volume.take_chores().used == (chunk_key("b"), chunk_key("a")), "the latest one last"
    assert says(volume, "chores_due") is False
    clock.advance(USED_NOTE_S)
    assert says(volume, "chores_due") is False


def test_other_chores_take_the_accesses_with_them(volume: Volume) -> None:
    volume.note_used([chunk_key("a")])
    volume.remove([place_of("x")])
    assert says(volume, "chores_due") is True
    assert volume.take_chores().used == (chunk_key("a"),)


def test_so_many_accesses_are_remembered(volume: Volume) -> None:
    keys = [chunk_key(number) for number in range(USED_KEYS_MAX + 3)]
    volume.note_used(keys)
    assert volume.take_chores().used == tuple(keys[3:])


def test_accesses_that_could_not_be_noted_come_before_later_ones(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_module, "USED_KEYS_MAX", 3)
    a, b, c, d = map(chunk_key, "abcd")
    volume.note_used([a, b])
    chores = volume.take_chores()
    volume.note_used([c, a])
    volume.return_chores(chores)
    assert volume.take_chores().used == (b, c, a)
    volume.note_used([a, b])
    chores = volume.take_chores()
    volume.note_used([c, d])
    volume.return_chores(chores)
    assert volume.take_chores().used == (b, c, d), "the oldest are dropped"


# Chores


def test_what_waits_to_be_unlinked_takes_no_room_and_is_counted(volume: Volume) -> None:
    volume.held_bytes = 50_000
    assert (volume.used_bytes, volume.room_bytes) == (50_000, 50_000)
    row = row_of("a")
    volume.let_go(row)
    assert volume.room_bytes == 50_000 + row.nbytes
    assert volume.used_bytes == 50_000
    (first, second) = volume.row_places(row).values()
    assert volume.going(first.path)
    chores = volume.take_chores()
    assert set(chores.remove) == {first, second}
    assert chores.removed == ((row.key, row.generation),)
    assert volume.used_bytes == 50_000, "handed over is not done"
    assert volume.going(second.path)
    volume.return_chores(chores)
    assert volume.used_bytes == 50_000, "nor counted twice"
    assert volume.take_chores() == chores
    volume.finish_chores(chores)
    assert volume.used_bytes == 50_000 - row.nbytes
    assert not volume.going(first.path)


def test_places_follow_from_the_row(volume: Volume) -> None:
    places = volume.row_places(row_of("a", generation=20))
    assert [place.nbytes for place in places.values()] == [4096, 8192]
    names = [Path(place.path).name for place in places.values()]
    assert [name.partition("-")[2] for name in names] == [f"{n:016x}.kvs" for n in (20, 21)]
    assert {place.generation for place in places.values()} == {20}
    assert {place.volume for place in places.values()} == {3}


def test_the_index_forgets_a_chunk_before_its_files_go(volume: Volume, files: FaultyFiles) -> None:
    row = row_of("a")
    volume.files.note(written(row))
    volume.held_bytes = row.nbytes
    before = len(files.calls)
    volume.let_go(row)
    volume.do(volume.take_chores())
    operations = [call.operation for call in files.calls[before:]]
    assert operations == [FileOperation.APPEND, FileOperation.REMOVE, FileOperation.REMOVE]
    assert len(volume.files.open().rows) == 0


def test_what_cannot_be_noted_is_not_unlinked(volume: Volume, files: FaultyFiles) -> None:
    volume.held_bytes = row_of("a").nbytes
    volume.let_go(row_of("a"))
    files.inject(FileFailure(operations=(FileOperation.APPEND,), errno=errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        volume.do(volume.take_chores())
    removals = [call.path for call in files.calls if call.operation is FileOperation.REMOVE]
    assert not any(path.endswith(".kvs") for path in removals)


def test_nothing_is_written_where_nothing_is_due(volume: Volume, files: FaultyFiles) -> None:
    before = len(files.calls)
    chores = volume.take_chores()
    assert chores.empty
    assert says(volume, "chores_due") is False
    volume.do(chores)
    assert len(files.calls) == before


def test_so_many_damaged_files_are_kept(volume: Volume) -> None:
    for number in range(QUARANTINE_FILES_MAX + 2):
        volume.put_away(place_of(f"bad{number}", 100))
    assert says(volume, "chores_due") is True
    chores = volume.take_chores()
    assert len(chores.quarantine) == QUARANTINE_FILES_MAX
    assert {place.path for place in chores.remove} >= {"/somewhere/bad0", "/somewhere/bad1"}
    assert volume.quarantined_count == QUARANTINE_FILES_MAX
    assert volume.quarantine_bytes == QUARANTINE_FILES_MAX * 100


def test_damaged_files_give_way_to_chunks(volume: Volume) -> None:
    volume.put_away(place_of("bad", 60_000))
    volume.finish_chores(volume.take_chores())
    assert volume.quarantine_bytes == 60_000
    assert says(volume, "chores_due") is False
    volume.held_bytes = 50_000
    assert says(volume, "chores_due") is True
    (gone,) = volume.take_chores().remove
    assert gone.path == volume.files.quarantine_path("/somewhere/bad")
    assert volume.quarantined_count == 0


# Health


def test_few_writes_are_out_and_none_before_the_sweep(volume: Volume) -> None:
    assert says(volume, "accepts") is True
    volume.writing_count = WRITES_INFLIGHT_MAX
    assert says(volume, "writable") is True
    assert says(volume, "accepts") is False
    volume.writing_count = 0
    volume.swept = False
    assert says(volume, "writable") is True
    assert says(volume, "accepts") is False


def test_few_reads_are_overdue(volume: Volume) -> None:
    volume.overdue = {partial(pytest.fail, "blamed") for _ in range(LATE_JOBS_MAX - 1)}
    assert says(volume, "answers") is True
    volume.overdue.add(partial(pytest.fail, "blamed"))
    assert says(volume, "answers") is False
    assert says(volume, "readable") is True


def test_writes_are_tried_again_after_a_while(volume: Volume, clock: FakeClock) -> None:
    volume.write_failed(OSError(errno.ENOSPC, "No space left"))
    assert volume.state[0] == "full"
    assert says(volume, "writable") is False
    assert says(volume, "readable") is True
    assert says(volume, "write_probe_due") is False
    clock.advance(HEALTH_BACKOFF_S_MIN)
    assert says(volume, "write_probe_due") is True
    assert says(volume, "accepts") is True
    volume.write_succeeded()
    assert volume.state == ("ok", "")
    assert says(volume, "write_probe_due") is False


def test_reads_are_paused_after_some_failures_and_probed(volume: Volume, clock: FakeClock) -> None:
    for count in range(READ_FAILURES_MAX):
        assert says(volume, "readable") is True, f"after {count} failures"
        assert says(volume, "read_probe_due") is False
        volume.read_failed(DeadlineError("no answer in time"))
    assert volume.state[0] == "slow"
    assert says(volume, "readable") is False
    assert says(volume, "read_probe_due") is False
    clock.advance(HEALTH_BACKOFF_S_MIN)
    assert says(volume, "readable") is True
    assert says(volume, "read_probe_due") is True
    volume.read_succeeded()
    assert says(volume, "read_probe_due") is False
    assert volume.state == ("ok", "")


def test_an_open_that_fails_is_due_again_later(volume: Volume, clock: FakeClock) -> None:
    volume.read_failed(DirectoryLostError("/somewhere"))
    assert volume.state[0] == "missing"
    assert says(volume, "opened") is False
    assert says(volume, "open_due") is False
    clock.advance(HEALTH_BACKOFF_S_MIN)
    assert says(volume, "open_due") is True
    volume.open_failed(TierUnavailableError("in use"))
    assert volume.state == ("unavailable", "in use")
    assert says(volume, "open_due") is False


def test_a_probe_reads_from_the_device(volume: Volume, files: FaultyFiles) -> None:
    volume.files.probe()
    files.inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
    with pytest.raises(OSError, match="Input/output"):
        volume.files.probe()


def test_what_is_being_put_away_is_known_until_it_is_done(volume: Volume) -> None:
    """A sweep that looks meanwhile would take it for a file that nobody knows."""
    place = place_of("bad")
    volume.put_away(place)
    assert volume.going(place.path)
    chores = volume.take_chores()
    assert volume.going(place.path)
    volume.finish_chores(chores)
    assert not volume.going(place.path)
