"""Payloads whose copy out of a convoy goes wrong, or that are given up around it: nobody waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.below import convoy
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import IO_THREADS_DEFAULT
from kvtier.types import Tier
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
