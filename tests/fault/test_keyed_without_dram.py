"""Payloads where there is no DRAM tier: they pass through a staging area, and are never lent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.keyed import KeyedCache
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import (
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    put,
    settle,
    written,
)
from tests.lib.lending_remote import LendingRemote

SIZES = {b"%d" % number: 70_000 + number for number in range(16)}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def emptied(cache: Cache) -> None:
    settle(cache)
    wait_until(lambda: not tier_stats(cache, Tier.DRAM).used_bytes, "something stays")
    assert not cache.window.lent_bytes


def test_a_remote_that_lends_is_copied_from(setup: KeyedSetup) -> None:
    setup.remote = remote = LendingRemote()
    keyed, cache = setup.open(dram_bytes=0, disk_bytes=None)
    for _ in range(2):
        put(keyed, SIZES)
        written(cache)
        emptied(cache)
        assert get(keyed, SIZES) == [Tier.REMOTE] * len(SIZES)
        emptied(cache)
    assert not remote.loans


def test_what_is_on_disk_alone_passes_through(setup: KeyedSetup) -> None:
    keyed, cache = setup.open(dram_bytes=0)
    put(keyed, SIZES)
    written(cache)
    emptied(cache)
    for _ in range(3):
        assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)
        emptied(cache)


def test_two_at_once_ask_for_all_of_it(setup: KeyedSetup) -> None:
    """What one has brought up may be gone again when the other comes to it."""
    keyed, cache = setup.open(dram_bytes=0)
    put(keyed, SIZES)
    written(cache)
    results: list[list[object]] = []

    def ask(face: KeyedCache) -> None:
        results.extend(list(get(face, SIZES)) for _ in range(5))

    threads = [threading.Thread(target=ask, args=(keyed,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    missed = {each for outcomes in results for each in outcomes if isinstance(each, MissReason)}
    assert not missed
    emptied(cache)


def test_a_damaged_payload_in_a_convoy_costs_itself_alone(setup: KeyedSetup) -> None:
    keyed, cache = setup.open(dram_bytes=0)
    put(keyed, SIZES)
    written(cache)
    emptied(cache)
    (_, path, *_) = setup.shard_files()
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    outcomes = get(keyed, SIZES)
    assert sorted(map(str, outcomes)) == ["corrupt", *["disk"] * 15]
    emptied(cache)


def test_a_hung_disk_keeps_a_staging_area_for_a_while(setup: KeyedSetup) -> None:
    keyed, cache = setup.open(dram_bytes=0)
    put(keyed, SIZES)
    written(cache)
    emptied(cache)
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    into = [bytearray(nbytes) for nbytes in SIZES.values()]
    transfer = keyed.get(list(SIZES), into)
    gate.wait_for_arrivals(4)
    transfer.cancel()
    assert finished(transfer) == [MissReason.CANCELLED] * len(SIZES)
    gate.open()
    emptied(cache)
    assert not any(map(any, into)), "a buffer is written to that was given back"
    assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)
