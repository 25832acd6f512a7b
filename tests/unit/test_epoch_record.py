"""Epochs as bytes: the same for equal epochs, and a floor where they are no record."""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest
import xxhash

from kvtier.constants import EPOCH_MAX
from kvtier.tiers.epoch_record import StoredEpochs, decode_epochs, encode_epochs

A, B = b"a" * 32, b"b" * 32


def summed(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body) + body


def test_equal_epochs_are_equal_bytes_and_come_back() -> None:
    data = encode_epochs({A: 3, B: EPOCH_MAX}, 2)
    assert data == encode_epochs({B: EPOCH_MAX, A: 3}, 2)
    assert decode_epochs(data) == StoredEpochs({A: 3, B: EPOCH_MAX}, 2)


def test_what_is_owed_comes_back_too() -> None:
    data = encode_epochs({A: 3}, 2, {A, b""})
    assert decode_epochs(data) == StoredEpochs({A: 3}, 2, owed=frozenset({A, b""}))


def test_a_record_of_a_version_that_owed_nothing_is_read() -> None:
    assert decode_epochs(summed(msgpack.packb((2, {A: 3})))) == StoredEpochs({A: 3}, 2)


@pytest.mark.parametrize(
    "row",
    [
        5,
        [],
        (1,),
        (1, []),
        ("1", {}),
        (-1, {}),
        (EPOCH_MAX + 1, {}),
        (True, {}),
        (1, {A: -1}),
        (1, {A: EPOCH_MAX + 1}),
        (1, {A: 1.0}),
        (1, {A[1:]: 1}),
        (1, {b"": 1}),
        (1, {"a" * 32: 1}),
        (1, {A: 1}, 7),
        (1, {A: 1}, [7]),
        (1, {A: 1}, [A[1:]]),
        (1, {A: 1}, [A], 1),
    ],
)
def test_a_good_sum_over_something_else_is_damage(row: object) -> None:
    assert decode_epochs(summed(msgpack.packb(row))).damaged


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\x01", b"\x81\x90\x01"])
def test_a_good_sum_over_no_row_is_damage(body: bytes) -> None:
    assert decode_epochs(summed(body)).damaged
