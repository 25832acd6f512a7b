"""Copies of payloads that lie in DRAM: some in one order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache import keyed_desk
from kvtier.cache.below.rooms import Rooms
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import KEYED_ORDER_MAX
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
)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


class HeldAt:
    """Copies out of DRAM, of which the one of a number waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.arrived, self.let_go = threading.Event(), threading.Event()
        copies = itertools.count(1)

        def held(slot: memoryview, buffer: Pieces) -> None:
            if next(copies) == number:
                self.arrived.set()
                assert self.let_go.wait(20), "nobody let the copy go"
            copy_out(slot, buffer)

        monkeypatch.setattr(keyed_desk, "copy_out", held)


def test_what_is_copied_in_one_order_is_bounded(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payloads of an order stay pinned until all of it was copied."""
    sizes = {bytes([n]): 100 for n in range(KEYED_ORDER_MAX + 1)}
    keyed, cache = setup.open(disk_bytes=None)
    put(keyed, sizes)
    copy = HeldAt(monkeypatch, KEYED_ORDER_MAX + 1)
    transfer = keyed.get(list(sizes), [bytearray(100) for _ in sizes])
    assert copy.arrived.wait(20)
    assert tier_stats(cache, Tier.DRAM).pinned_chunks == 1
    copy.let_go.set()
    assert finished(transfer) == [Tier.DRAM] * len(sizes)


def test_who_cannot_be_let_go_as_it_should_keeps_no_other_payload_waiting(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {bytes([n]): 100 for n in range(4)}
    keyed, cache = setup.open(disk_bytes=None)
    put(keyed, sizes)
    settle(cache)
    calls, pump = itertools.count(1), Rooms.pump

    def raising(rooms: Rooms) -> None:
        if next(calls) == 2:
            raise LookupError("an admission went wrong")
        pump(rooms)

    monkeypatch.setattr(Rooms, "pump", raising)
    assert get(keyed, sizes) == [Tier.DRAM] * len(sizes)
    settle(cache)
    assert [record.getMessage() for record in setup.errors] == ["a callback failed"]
    setup.errors.clear()


def test_what_is_copied_when_its_epoch_ends_counts_for_nothing(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.open(disk_bytes=None)
    put(keyed, {b"k": 100})
    copy = HeldAt(monkeypatch, 1)
    transfer = keyed.get([b"k"], [bytearray(100)])
    assert copy.arrived.wait(20)
    cache.invalidate(NAMESPACE)
    copy.let_go.set()
    assert finished(transfer) == [MissReason.ABSENT]


def test_a_payload_that_is_copied_stays_though_it_is_deleted_and_stored_anew(
    setup: KeyedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, cache = setup.open(disk_bytes=None)
    put(keyed, {b"k": 100})
    copy = HeldAt(monkeypatch, 1)
    into = bytearray(100)
    transfer = keyed.get([b"k"], [into])
    assert copy.arrived.wait(20)
    keyed.delete([b"k"])
    assert keyed.contains([b"k"]) == [False]
    copy.let_go.set()
    assert finished(transfer) == [Tier.DRAM]
    assert into == payload(b"k", 100)
    assert put(keyed, {b"k": 100}, 1) == [Tier.DRAM]
    assert get(keyed, {b"k": 100}, 1) == [Tier.DRAM]
    settle(cache)
