"""Payloads that come up from disk together: what becomes of them when one, or all, hang or end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache import fetcher
from kvtier.cache.below import convoy
from kvtier.cache.keyed import KeyedCache
from kvtier.clock import SystemClock
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import IO_THREADS_DEFAULT, KEYED_FETCH_BYTES_MAX, MIB
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import (
    NAMESPACE,
    POISON,
    SCHEME,
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    payload,
    settle,
)

NBYTES = 70_000
#: More than there are threads, so that some wait for their turn.
SIZES = {b"%d" % number: NBYTES for number in range(3 * IO_THREADS_DEFAULT)}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def hung_read(setup: KeyedSetup, nth: int = 1) -> FileGate:
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs", nth=nth, last=nth)
    setup.files.inject(gate)
    return gate


def test_one_read_that_hangs_holds_up_no_other(setup: KeyedSetup) -> None:
    clock = FakeClock()
    keyed, cache = setup.on_disk(SIZES)
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    gate = hung_read(setup, nth=2)
    into = [bytearray([POISON]) * NBYTES for _ in SIZES]
    transfer = keyed.get(list(SIZES), into, deadline=clock.now() + 1.0)
    gate.wait_for_arrivals()
    wait_until(lambda: tier_stats(cache, Tier.DISK).counters.hit_tokens == 11, "others wait")
    assert transfer.poll() is None
    clock.advance(1.0)
    outcomes = finished(transfer)
    assert sorted(map(str, outcomes)) == ["deadline", *["disk"] * 11]
    gate.open()
    settle(cache)
    for key, data, outcome in zip(SIZES, into, outcomes, strict=True):
        hung = outcome is MissReason.DEADLINE
        assert data == (bytearray([POISON]) * NBYTES if hung else payload(key, NBYTES))


def test_a_cancelled_transfer_ends_at_once_though_all_reads_hang(setup: KeyedSetup) -> None:
    """Those that wait for a thread too."""
    keyed, cache = setup.on_disk(SIZES)
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    transfer = keyed.get(list(SIZES), [bytearray(NBYTES) for _ in SIZES], deadline=None)
    late = keyed.get([b"late"], [bytearray(NBYTES)])
    gate.wait_for_arrivals(IO_THREADS_DEFAULT)
    transfer.cancel()
    assert finished(transfer) == [MissReason.CANCELLED] * len(SIZES)
    assert finished(late) == [MissReason.ABSENT]
    gate.open()
    settle(cache)
    assert cache.stats().late_jobs == 0


def test_overdue_reads_are_counted_and_end(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk({b"k": NBYTES})
    gate = hung_read(setup)
    into = bytearray([POISON]) * NBYTES
    transfer = keyed.get([b"k"], [into], deadline=0.0)
    assert finished(transfer) == [MissReason.DEADLINE], "begun too late"
    soon = SystemClock().now() + 0.5
    transfer = keyed.get([b"k"], [into], deadline=soon)
    gate.wait_for_arrivals()
    wait_until(lambda: cache.stats().late_jobs == 1, "the executor keeps no deadline")
    assert finished(transfer) == [MissReason.DEADLINE]
    gate.open()
    settle(cache)
    assert cache.stats().late_jobs == 0
    assert into == bytearray([POISON]) * NBYTES
    assert get(keyed, {b"k": NBYTES}) == [Tier.DISK]


def test_who_else_asks_follows_the_read_that_runs(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk({b"k": NBYTES})
    other = KeyedCache(cache, NAMESPACE, SCHEME)
    gate = hung_read(setup)
    first, second = bytearray(NBYTES), bytearray(NBYTES)
    transfers = [keyed.get([b"k"], [first])]
    gate.wait_for_arrivals()
    transfers.append(other.get([b"k"], [second]))
    assert transfers[1].poll() is None
    transfers[0].cancel()
    gate.open()
    assert finished(transfers[0]) == [MissReason.CANCELLED]
    assert finished(transfers[1]) == [Tier.DISK]
    assert (first, bytes(second)) == (bytearray(NBYTES), payload(b"k", NBYTES))
    assert tier_stats(cache, Tier.DISK).counters.read_bytes < 2 * NBYTES, "read once"
    other.close()


def test_an_epoch_that_ends_meanwhile_leaves_nothing_to_give(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk({b"k": NBYTES})
    gate = hung_read(setup)
    transfer = keyed.get([b"k"], [bytearray(NBYTES)])
    gate.wait_for_arrivals()
    cache.invalidate(NAMESPACE)
    gate.open()
    assert finished(transfer) == [MissReason.ABSENT]


def test_a_copy_that_runs_when_its_face_is_closed_is_awaited(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.on_disk({b"k": NBYTES})
    arrived, go = threading.Event(), threading.Event()

    def held(slot: memoryview, buffer: Pieces) -> None:
        arrived.set()
        assert go.wait(20), "nobody let the copy go"
        copy_out(slot, buffer)

    monkeypatch.setattr(convoy, "copy_out", held)
    into = bytearray(NBYTES)
    transfer = keyed.get([b"k"], [into])
    assert arrived.wait(20)
    transfer.cancel()
    assert transfer.poll() is None
    closing = threading.Thread(target=keyed.close)
    closing.start()
    assert transfer.poll() is None
    go.set()
    closing.join()
    assert finished(transfer) == [Tier.DISK]
    assert into == payload(b"k", NBYTES)
    settle(cache)


def test_what_is_too_large_comes_by_a_load(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its first sections are copied while the others are read."""
    assert KEYED_FETCH_BYTES_MAX >= MIB
    monkeypatch.setattr(fetcher, "KEYED_FETCH_BYTES_MAX", NBYTES)
    sizes = {b"small": NBYTES, b"large": NBYTES + 1}
    keyed, cache = setup.on_disk(sizes)
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    transfer = keyed.get(list(sizes), [bytearray(nbytes) for nbytes in sizes.values()])
    gate.wait_for_arrivals(2)
    assert cache.stats().loads_inflight == 1
    gate.open()
    assert finished(transfer) == [Tier.DISK, Tier.DISK]
