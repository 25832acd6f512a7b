"""Payloads where there is no DRAM tier: they pass through a staging area, and are never lent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.keyed import KeyedCache
from kvtier.constants import STORE_DEADLINE_S
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import (
    NAMESPACE,
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    payload,
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


@pytest.mark.parametrize("share", [0.6, 2.4], ids=["200 of 256 MiB", "600 of 256 MiB"])
def test_more_than_may_stay_at_once_is_stored_in_turns(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", int(sum(SIZES.values()) / share))
    keyed, cache = setup.open(dram_bytes=0)
    gate = FileGate(operations=(FileOperation.CREATE,), path="incoming")
    setup.files.inject(gate)
    items = [(key, payload(key, nbytes)) for key, nbytes in SIZES.items()]
    transfer = keyed.put(items)
    gate.wait_for_arrivals()
    wait_until(lambda: transfer.poll() is None and _crowded(cache) > 0, "none has to wait")
    gate.open()
    assert finished(transfer) == [Tier.DRAM] * len(SIZES)
    written(cache)
    emptied(cache)
    assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)
    assert 0 < _crowded(cache) < len(SIZES), "each counts once, however often it was offered"


def test_who_waits_for_a_staging_area_waits_until_the_deadline(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", sum(SIZES.values()) // 2)
    clock = FakeClock()
    keyed, cache = setup.open(dram_bytes=0, clock=clock)
    gate = FileGate(operations=(FileOperation.CREATE,), path="incoming")
    setup.files.inject(gate)
    transfer = keyed.put([(key, payload(key, nbytes)) for key, nbytes in SIZES.items()])
    gate.wait_for_arrivals()
    wait_until(lambda: transfer.poll() is None and _crowded(cache) > 0, "none has to wait")
    clock.advance(STORE_DEADLINE_S)
    outcomes = finished(transfer)
    assert set(outcomes) == {Tier.DRAM, MissReason.CROWDED}
    gate.open()
    written(cache)
    emptied(cache)


def test_a_payload_in_place_of_one_of_another_size_takes_its_turn_too(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", sum(SIZES.values()) // 2)
    keyed, cache = setup.open(dram_bytes=0)
    put(keyed, {b"again": 90_000})
    written(cache)
    emptied(cache)
    gate = FileGate(operations=(FileOperation.CREATE,), path="incoming")
    setup.files.inject(gate)
    first = keyed.put([(key, payload(key, nbytes)) for key, nbytes in SIZES.items()])
    gate.wait_for_arrivals()
    wait_until(lambda: first.poll() is None and _crowded(cache) > 0, "none has to wait")
    crowded = _crowded(cache)
    second = keyed.put([(b"again", payload(b"again", 91_000))])
    assert (second.poll(), _crowded(cache)) == (None, crowded + 1)
    gate.open()
    assert set(finished(first) + finished(second)) == {Tier.DRAM}
    written(cache)
    emptied(cache)
    assert get(keyed, {b"again": 91_000}) == [Tier.DISK]


def test_whose_epoch_ends_waits_no_more_for_a_staging_area(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.config.STAGING_BYTES", sum(SIZES.values()) // 2)
    keyed, cache = setup.open(dram_bytes=0, clock=FakeClock())
    gate = FileGate(operations=(FileOperation.CREATE,), path="incoming")
    setup.files.inject(gate)
    transfer = keyed.put([(key, payload(key, nbytes)) for key, nbytes in SIZES.items()])
    gate.wait_for_arrivals()
    wait_until(lambda: transfer.poll() is None and _crowded(cache) > 0, "none has to wait")
    cache.invalidate(NAMESPACE)
    assert set(finished(transfer)) == {Tier.DRAM, MissReason.UNAVAILABLE}
    gate.open()
    written(cache)
    emptied(cache)


def _crowded(cache: Cache) -> int:
    return tier_stats(cache, Tier.DRAM).counters.refused_chunks.get(MissReason.CROWDED, 0)


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
