"""Foreign keys over tiers that fail, lie or hang: an outcome in time, and no wrong byte."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache import keyed_desk
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import MIB, STORE_DEADLINE_S
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import (
    EVER,
    BitFlip,
    FileFailure,
    FileGate,
    FileOperation,
    ShortRead,
)
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import (
    POISON,
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    payload,
    put,
    settle,
    written,
)

READ = (FileOperation.READ,)
SHARD = ".kvs"
SIZES = {b"a": 3 * MIB + 5, b"b": 70_000, b"c": 1}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


class HeldCopy:
    """Copies out of slots that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.let_go = threading.Event()

        def held(slot: memoryview, buffer: Pieces) -> None:
            self.arrived.set()
            assert self.let_go.wait(20), "nobody let the copy go"
            copy_out(slot, buffer)

        monkeypatch.setattr(keyed_desk, "copy_out", held)


# Lies


@pytest.mark.parametrize("at", ["header", "first section", "last section", "cut", "gone"])
def test_b44_b78_bit_flip_on_disk_is_a_miss_and_is_written_again(
    setup: KeyedSetup, at: str
) -> None:
    keyed, _ = setup.on_disk({b"k": 3 * MIB + 5})
    (path,) = setup.shard_files()
    data = bytearray(path.read_bytes())
    if at in ("cut", "gone"):
        del data[-4096:]
    else:
        data[{"header": 40, "first section": 5000, "last section": 3 * MIB + 4096}[at]] ^= 1
    path.unlink() if at == "gone" else path.write_bytes(data)
    reason = MissReason.ABSENT if at == "gone" else MissReason.CORRUPT
    assert get(keyed, {b"k": 3 * MIB + 5}) == [reason]
    assert get(keyed, {b"k": 3 * MIB + 5}) == [MissReason.ABSENT]
    assert put(keyed, {b"k": 3 * MIB + 5}) == [Tier.DRAM]
    assert get(keyed, {b"k": 3 * MIB + 5}) == [Tier.DRAM]


def test_b78_files_that_change_places_are_no_hits(setup: KeyedSetup) -> None:
    """Each is sound; neither is what it is asked for as. Of one size, so only the key differs."""
    keyed, _ = setup.on_disk({b"a": 5000, b"b": 5000})
    first, second = setup.shard_files()
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert get(keyed, {b"a": 5000, b"b": 5000}) == [MissReason.CORRUPT] * 2


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("kind", ["error", "short", "flip"])
def test_b74_whichever_read_goes_wrong_the_others_are_right(
    setup: KeyedSetup, nth: int, kind: str
) -> None:
    """``get`` looks at the bytes of all that is said to have come."""
    keyed, _ = setup.on_disk(SIZES)
    fault = {
        "error": FileFailure(operations=READ, path=SHARD, nth=nth),
        "short": ShortRead(path=SHARD, nbytes=0, nth=nth),
        "flip": BitFlip(path=SHARD, nth=nth),
    }[kind]
    setup.files.inject(fault)
    outcomes = get(keyed, SIZES)
    wrong = [outcome for outcome in outcomes if outcome is not Tier.DISK]
    assert len(wrong) <= 1
    assert set(wrong) <= {MissReason.IO_ERROR if kind == "error" else MissReason.CORRUPT}
    setup.files.inject()
    put(keyed, SIZES)
    assert all(isinstance(outcome, Tier) for outcome in get(keyed, SIZES))


# Hangs


def test_a_hung_disk_costs_the_deadline_and_touches_no_buffer_later(
    setup: KeyedSetup,
) -> None:
    clock = FakeClock()
    keyed, cache = setup.on_disk({b"k": 70_000, b"m": 9})
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    put(keyed, {b"in dram": 100})
    gate = FileGate(operations=READ, path=SHARD)
    setup.files.inject(gate)
    into = [bytearray([POISON]) * n for n in (70_000, 9, 100)]
    transfer = keyed.get([b"k", b"m", b"in dram"], into, deadline=clock.now() + 1.0)
    gate.wait_for_arrivals(2)
    wait_until(lambda: into[2] == payload(b"in dram", 100), "what lies in DRAM does not come")
    assert transfer.poll() is None
    clock.advance(1.0)
    assert finished(transfer) == [MissReason.DEADLINE, MissReason.DEADLINE, Tier.DRAM]
    gate.open()
    wait_until(lambda: cache.stats().late_jobs == 0, "late reads do not end")
    settle(cache)
    assert into == [bytearray([POISON]) * 70_000, bytearray([POISON]) * 9, payload(b"in dram", 100)]


def test_a_copy_that_runs_at_the_deadline_is_awaited(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a thread may write to a buffer, its outcome is not told."""
    clock = FakeClock()
    keyed, cache = setup.open(clock=clock)
    put(keyed, {b"k": 70_000})
    copy = HeldCopy(monkeypatch)
    into = bytearray(70_000)
    transfer = keyed.get([b"k"], [into], deadline=clock.now() + 1.0)
    assert copy.arrived.wait(20)
    clock.advance(5.0)
    transfer.cancel()
    for _ in range(100):
        assert transfer.poll() is None
    assert tier_stats(cache, Tier.DRAM).pinned_chunks == 1
    copy.let_go.set()
    finished(transfer)
    assert into == payload(b"k", 70_000)
    settle(cache)


def test_a_copy_that_has_not_begun_by_the_deadline_is_not_made(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    keyed, cache = setup.open(clock=clock)
    put(keyed, {b"first": 10, b"second": 10})
    copy = HeldCopy(monkeypatch)
    first, second = bytearray(10), bytearray([POISON]) * 10
    earlier = keyed.get([b"first"], [first])
    assert copy.arrived.wait(20)
    transfer = keyed.get([b"second"], [second], deadline=clock.now() + 1.0)
    clock.advance(1.0)
    assert transfer.poll() is None, "its plan is out"
    copy.let_go.set()
    assert finished(transfer) == [MissReason.DEADLINE]
    assert finished(earlier) == [Tier.DRAM]
    assert second == bytearray([POISON]) * 10
    settle(cache)


def test_nobody_polls_and_nothing_is_left_over(setup: KeyedSetup) -> None:
    """A caller that has gone away: the cache's own housekeeping ends the load."""
    clock = FakeClock()
    keyed, cache = setup.on_disk({b"k": 70_000})
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    into = bytearray([POISON]) * 70_000
    gate = FileGate(operations=READ, path=SHARD)
    setup.files.inject(gate)
    keyed.get([b"k"], [into], deadline=clock.now() + 1.0)
    gate.wait_for_arrivals()
    clock.advance(1.0)
    gate.open()
    settle(cache)
    assert into == bytearray([POISON]) * 70_000


# Room


def test_a_full_disk_refuses_writes_and_serves_from_dram(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    full = FileFailure(operations=(FileOperation.CREATE,), errno=errno.ENOSPC, last=EVER)
    setup.files.inject(full)
    assert put(keyed, SIZES) == [Tier.DRAM] * 3
    wait_until(lambda: tier_stats(cache, Tier.DISK).state == "full", "the disk is not full")
    assert get(keyed, SIZES) == [Tier.DRAM] * 3
    assert put(keyed, {b"more": 100}) == [Tier.DRAM]


def test_a_disk_that_fails_reads_is_left_alone_after_a_few(setup: KeyedSetup) -> None:
    sizes = {bytes([n]): 100 for n in range(20)}
    keyed, cache = setup.on_disk(sizes)
    setup.files.inject(FileFailure(operations=READ, path=SHARD, errno=errno.EIO, last=EVER))
    for key in sizes:
        outcomes = get(keyed, {key: 100})
        assert outcomes[0] in (MissReason.IO_ERROR, MissReason.ABSENT, MissReason.UNAVAILABLE)
    assert tier_stats(cache, Tier.DISK).counters.io_errors < 10
    assert put(keyed, {b"new": 100}) == [Tier.DRAM]


@pytest.mark.parametrize("nth", range(1, 12))
def test_whichever_call_of_the_disk_fails_what_is_there_is_right(
    setup: KeyedSetup, nth: int
) -> None:
    """Fail at the n-th call of any kind, for every n that a put, a restart and a get make."""
    setup.files.inject(FileFailure(operations=tuple(FileOperation), nth=nth))
    keyed, cache = setup.open(dram_bytes=5 * MIB)
    put(keyed, SIZES)
    written(cache)
    setup.close(keyed)
    keyed, cache = setup.open()
    get(keyed, SIZES)
    setup.files.inject()
    put(keyed, SIZES)
    assert all(isinstance(outcome, Tier) for outcome in get(keyed, SIZES))
    setup.errors.clear()


# The end


def test_close_in_the_middle_of_everything(setup: KeyedSetup) -> None:
    """A read hangs, a copy waits: each transfer is told its outcome and no buffer changes after."""
    keyed, cache = setup.on_disk({b"k": 70_000, **{bytes([n]): 10 for n in range(50)}})
    gate = FileGate(operations=READ, path=SHARD)
    setup.files.inject(gate)
    into = bytearray([POISON]) * 70_000
    reading = keyed.get([b"k"], [into])
    waiting = keyed.get([bytes([n]) for n in range(50)], [bytearray(10) for _ in range(50)])
    gate.wait_for_arrivals()
    storing = keyed.put([(b"new", payload(b"new", MIB))])
    keyed.close()
    assert reading.poll() == [MissReason.CANCELLED]
    assert waiting.poll() == [MissReason.CANCELLED] * 50
    assert storing.poll() == [Tier.DRAM]
    gate.open()
    settle(cache)
    assert into == bytearray([POISON]) * 70_000
    assert get(keyed, {b"k": 70_000}) == [MissReason.UNAVAILABLE]
    assert put(keyed, {b"k": 70_000}) == [MissReason.UNAVAILABLE]


def test_close_awaits_the_copy_that_runs(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.open()
    put(keyed, {b"k": 1000})
    copy = HeldCopy(monkeypatch)
    into = bytearray(1000)
    transfer = keyed.get([b"k"], [into])
    assert copy.arrived.wait(20)
    closing = threading.Thread(target=keyed.close)
    closing.start()
    assert transfer.poll() is None
    copy.let_go.set()
    closing.join()
    assert transfer.poll() is not None
    assert into == payload(b"k", 1000)
    settle(cache)


def test_an_engine_that_loses_a_worker_takes_no_copy_with_it(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache answers for a dead worker; a copy of ours that runs is not answered for."""
    keyed, cache = setup.open()
    put(keyed, {b"k": 1000})
    copy = HeldCopy(monkeypatch)
    into = bytearray(1000)
    transfer = keyed.get([b"k"], [into])
    assert copy.arrived.wait(20)
    cache.lose_worker(0)
    assert transfer.poll() is None
    copy.let_go.set()
    finished(transfer)
    settle(cache)


def test_the_deadline_of_a_put_that_waits_for_another_is_kept(setup: KeyedSetup) -> None:
    """Its key is deleted and still being read, and the disk hangs."""
    clock = FakeClock()
    keyed, cache = setup.on_disk({b"k": 1000})
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    gate = FileGate(operations=READ, path=SHARD)
    setup.files.inject(gate)
    reading = keyed.get([b"k"], [bytearray(1000)])
    gate.wait_for_arrivals()
    keyed.delete([b"k"])
    transfer = keyed.put([(b"k", payload(b"k", 1000, 1))])
    assert transfer.poll() is None
    clock.advance(STORE_DEADLINE_S)
    assert finished(transfer) == [MissReason.DEADLINE]
    assert finished(reading) == [MissReason.DEADLINE]
    gate.open()
    settle(cache)
    assert keyed.contains([b"k"]) == [False]
