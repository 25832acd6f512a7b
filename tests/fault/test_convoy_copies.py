"""Payloads of a convoy whose copy goes wrong, or whose turn never comes: nobody waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.below import convoy
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import IO_THREADS_DEFAULT
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import KeyedSetup, finished, get, keyed_setup, settle

NBYTES = 70_000
SIZES = {b"%d" % number: NBYTES for number in range(3 * IO_THREADS_DEFAULT)}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def test_a_copy_that_raises_costs_its_own_payload_alone(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.on_disk(SIZES)
    copies = itertools.count(1)

    def broken(slot: memoryview, buffer: Pieces) -> None:
        if next(copies) == 5:
            raise MemoryError("no memory to copy with")
        copy_out(slot, buffer)

    monkeypatch.setattr(convoy, "copy_out", broken)
    outcomes = finished(keyed.get(list(SIZES), [bytearray(NBYTES) for _ in SIZES]))
    assert sorted(map(str, outcomes)) == [*["disk"] * 11, "dram"], "it lies there now"
    settle(cache)
    (logged,) = setup.errors
    setup.errors.remove(logged)
    assert get(keyed, SIZES) == [Tier.DRAM] * len(SIZES)


def test_what_no_thread_has_begun_by_the_deadline_is_nobodys_fault(setup: KeyedSetup) -> None:
    """Only what is being read keeps its slot, and counts against the directory."""
    clock = FakeClock()
    keyed, cache = setup.on_disk(SIZES)
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    into = [bytearray(NBYTES) for _ in SIZES]
    transfer = keyed.get(list(SIZES), into, deadline=clock.now() + 0.5)
    gate.wait_for_arrivals(IO_THREADS_DEFAULT)
    clock.advance(0.5)
    assert finished(transfer) == [MissReason.DEADLINE] * len(SIZES)
    wait_until(
        lambda: cache.stats().late_jobs == IO_THREADS_DEFAULT, "the executor keeps no deadline"
    )
    few_bytes = (IO_THREADS_DEFAULT + 1) * NBYTES
    wait_until(lambda: tier_stats(cache, Tier.DRAM).used_bytes < few_bytes, "all slots are kept")
    gate.open()
    settle(cache)
    assert cache.stats().late_jobs == 0
    assert not any(map(any, into)), "a buffer is written to that was given back"
