"""Payloads of a convoy that are not settled as they should be: whoever waits gets an outcome."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache import fetcher
from kvtier.cache.below.disk_source import DiskSource
from kvtier.cache.keyed import KeyedCache
from kvtier.cache.spans import record_load
from kvtier.constants import CONVOY_STIR_PAYLOADS, IO_THREADS_DEFAULT
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import NAMESPACE, SCHEME, KeyedSetup, finished, keyed_setup, settle

NBYTES = 70_000
SIZES = {b"%d" % number: NBYTES for number in range(4 * IO_THREADS_DEFAULT)}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def raising_at(turns: set[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what raises in some of its calls, in which all else is as ever."""
    calls = itertools.count(1)

    def twisted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in turns:
            raise LookupError("settling went wrong")
        return function(*args, **kwargs)

    return twisted


def expect_logged(setup: KeyedSetup, count: int) -> None:
    """Each exception reached the log once."""
    logged = [record for record in setup.errors if record.exc_info]
    assert len(logged) == len(setup.errors) == count
    setup.errors.clear()


#: As many as there are reading threads: were each to cost one, nobody would bring the rest.
TURNS = set(range(2, 2 + IO_THREADS_DEFAULT))


def test_a_payload_that_cannot_be_settled_counts_as_unread_and_the_others_come(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.on_disk(SIZES)
    monkeypatch.setattr(DiskSource, "settle", raising_at(TURNS, DiskSource.settle))
    buffers = [bytearray(NBYTES) for _ in SIZES]
    outcomes = finished(keyed.get(list(SIZES), buffers, deadline=math.inf))
    assert outcomes == [Tier.DISK] * len(SIZES), "what was unread is asked for once more"
    assert tier_stats(cache, Tier.DISK).counters.io_errors == len(TURNS)
    settle(cache)
    expect_logged(setup, len(TURNS))


def test_a_payload_whose_end_cannot_be_counted_is_answered(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.on_disk(SIZES)
    monkeypatch.setattr(fetcher, "record_load", raising_at(TURNS, record_load))
    buffers = [bytearray(NBYTES) for _ in SIZES]
    outcomes = finished(keyed.get(list(SIZES), buffers, deadline=math.inf))
    # The chunks have come, so that what is asked for again is there.
    assert outcomes.count(Tier.DISK) == len(SIZES) - len(TURNS)
    assert outcomes.count(Tier.DRAM) == len(TURNS)
    settle(cache)
    expect_logged(setup, len(TURNS))


def test_who_is_to_be_told_and_raises_keeps_no_payload_from_coming(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk(SIZES)
    setup.close(keyed)
    keyed, cache = setup.open()

    def stirred() -> None:
        raise LookupError("nobody listens")

    told = KeyedCache(cache, NAMESPACE, SCHEME, stirred=stirred)
    buffers = [bytearray(NBYTES) for _ in SIZES]
    transfer = told.get(list(SIZES), buffers, deadline=math.inf)
    assert finished(transfer) == [Tier.DISK] * len(SIZES)
    settle(cache)
    told.close()
    expect_logged(setup, len(SIZES) // CONVOY_STIR_PAYLOADS)


def test_at_the_deadline_all_are_answered_whichever_cannot_be_settled(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    keyed, cache = setup.on_disk(SIZES)
    setup.close(keyed)
    keyed, cache = setup.open(clock=clock)
    monkeypatch.setattr(DiskSource, "settle", raising_at({1}, DiskSource.settle))
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    buffers = [bytearray(NBYTES) for _ in SIZES]
    transfer = keyed.get(list(SIZES), buffers, deadline=clock.now() + 0.5)
    gate.wait_for_arrivals(IO_THREADS_DEFAULT)
    wait_until(lambda: cache.stats().late_jobs == IO_THREADS_DEFAULT, "not all are answered")
    clock.advance(0.5)
    assert all(isinstance(outcome, MissReason) for outcome in finished(transfer))
    gate.open()
    wait_until(lambda: cache.stats().late_jobs == 0, "the reads do not end")
    expect_logged(setup, 1)
