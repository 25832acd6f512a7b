"""The calibration of the centred codecs: how K is turned, and which means a shard gets."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import xxhash

from kvtier.codecs.calibration import (
    CALIBRATION_BYTES_MAX,
    Calibration,
    Rotary,
    parse_calibration,
)
from kvtier.errors import ConfigError, FormatError
from kvtier.types import GroupKind, KVGroup, KVLayout, ShardId, ShardLayout

FREQUENCIES = (1.0, 0.25, 0.0625)


def by_complex_numbers(row: list[float], rotary: Rotary, position: int) -> list[float]:
    """Turn one row pair by pair, as RoPE is defined."""
    turned = list(row)
    half = len(rotary.inverse_frequencies)
    for pair, frequency in enumerate(rotary.inverse_frequencies):
        first, second = pair, pair + half
        if rotary.interleaved:
            first, second = 2 * pair, 2 * pair + 1
        first, second = first + rotary.start, second + rotary.start
        number = complex(row[first], row[second]) * np.exp(1j * position * frequency)
        turned[first] = number.real * rotary.scaling
        turned[second] = number.imag * rotary.scaling
    return turned


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(FREQUENCIES),
        Rotary(FREQUENCIES, interleaved=True),
        Rotary(FREQUENCIES, start=2),
        Rotary(FREQUENCIES, start=1, interleaved=True, scaling=1.25),
    ],
    ids=str,
)
def test_a_mean_is_turned_as_rope_turns_k(rotary: Rotary) -> None:
    row = np.arange(1, 9, dtype=np.float32)
    cosine, sine = rotary.turns(1000, 3, 8)
    turned = row * cosine + rotary.partner(row) * sine
    for token in range(3):
        expected = by_complex_numbers(row.tolist(), rotary, 1000 + token)
        assert turned[token] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def layout(head_groups: int = 2) -> KVLayout:
    full = KVGroup(GroupKind.FULL, (0, 2, 4), kv_heads=4, k_dim=6, v_dim=6, dtype="float32")
    window = KVGroup(GroupKind.WINDOW, (1, 3), 1, 8, 8, "float32", window_tokens=4)
    return KVLayout((full, window), head_groups=head_groups, stage_starts=(0, 2))


def means() -> tuple[np.ndarray, ...]:
    return (
        np.arange(72, dtype=np.float32).reshape(3, 4, 6),
        np.arange(16, dtype=np.float32).reshape(2, 1, 8),
    )


def calibration(head_groups: int = 2) -> Calibration:
    return Calibration(layout(head_groups), means(), (Rotary(FREQUENCIES), Rotary(FREQUENCIES)))


def test_a_shard_gets_the_means_of_its_layers_and_heads() -> None:
    known = calibration()
    full, window = means()
    shard = ShardLayout(2, 2, 6, 6, "float32", 4)
    assert np.array_equal(known.mean(ShardId(0, 1, 1), shard), full[1:3, 2:4])
    # With more groups than heads, neighbours are replicas of one head.
    shard = ShardLayout(1, 1, 8, 8, "float32", 4)
    assert np.array_equal(known.mean(ShardId(1, 0, 1), shard), window[0:1])
    assert np.array_equal(known.mean(ShardId(1, 1, 0), shard), window[1:2])


def test_the_digest_is_of_the_model_and_not_of_how_it_is_cut() -> None:
    known = calibration()
    assert known.digest == calibration(head_groups=4).digest
    full, window = means()
    full[0, 0, 0] += 1
    other = Calibration(known.layout, (full, window), known.rotaries)
    turned = Calibration(known.layout, known.means, (Rotary(FREQUENCIES, scaling=2), Rotary(())))
    assert len({known.digest, other.digest, turned.digest}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"means": means()[:1]}, "per KV group"),
        ({"means": (means()[0], means()[1].astype(np.float64))}, "float64"),
        ({"means": (means()[0][:2], means()[1])}, r"not float32 \(3, 4, 6\)"),
        ({"means": (means()[0] * np.float32("nan"), means()[1])}, "NaN"),
        ({"rotaries": (Rotary(FREQUENCIES, start=1), Rotary(()))}, "up to 7"),
        ({"rotaries": (Rotary((), start=-1), Rotary(()))}, "columns"),
    ],
    ids=["count", "dtype", "shape", "nan", "columns", "start"],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    known = calibration()
    arguments = {"layout": known.layout, "means": known.means, "rotaries": known.rotaries}
    with pytest.raises(ConfigError, match=message):
        Calibration(**{**arguments, **changes})  # type: ignore[arg-type]


def test_bytes_say_all_and_have_one_form() -> None:
    full, window = means()
    rotaries = (Rotary(FREQUENCIES, interleaved=True, scaling=1.25), Rotary((0.1,), start=3))
    known = Calibration(layout(), (full, window), rotaries, weak_layers=(2, 3))
    data = known.to_bytes()
    found = parse_calibration(data, layout())
    assert found.rotaries == rotaries
    assert found.weak_layers == (2, 3)
    assert all(np.array_equal(*pair) for pair in zip(found.means, known.means, strict=True))
    assert found.to_bytes() == data
    assert found.digest == known.digest == hashlib.sha256(data).hexdigest()
    # Cut otherwise, it is the same model's.
    assert parse_calibration(data, layout(head_groups=4)).layout == layout(head_groups=4)


def test_b78_every_flipped_bit_of_a_calibration_is_found() -> None:
    data = bytearray(calibration().to_bytes())
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        with pytest.raises(FormatError):
            parse_calibration(bytes(data), layout())
        data[place] ^= 1 << place % 8


def test_other_bytes_are_refused() -> None:
    data = calibration().to_bytes()
    for wrong in (b"", data[:24], data[:-1], data + b"\0", bytes(CALIBRATION_BYTES_MAX + 1)):
        with pytest.raises(FormatError):
            parse_calibration(wrong, layout())
    newer = data[:4] + b"\2\0\0\0" + data[8:]
    with pytest.raises(FormatError, match="version is 2"):
        parse_calibration(newer, layout())


@pytest.mark.parametrize(
    "body",
    [
        [],
        [[], [[]]],
        [[], [[[0], 1, 2, b"\0" * 7, b"", 0, False, 1.0]]],
        [["x"], []],
        {"a": 1},
        [[], [[[0], 1, -1, b"", b"", 0, False, 1.0]]],
        [[math.inf], []],
        [[], [[[0], 1, 2, b"\0" * 8, b"", math.inf, False, 1.0]]],
    ],
    ids=str,
)
def test_a_body_with_a_checksum_and_no_sense_is_refused(body: object) -> None:
    packed = msgpack.packb(body)
    data = b"KVTC\1\0\0\0" + xxhash.xxh3_128_digest(packed) + packed
    with pytest.raises((FormatError, ConfigError)):
        parse_calibration(data, layout())


@pytest.mark.parametrize("changes", [{"layers": (0, 2, 5)}, {"kv_heads": 8}, {"k_dim": 8}], ids=str)
def test_another_models_calibration_is_refused(changes: dict[str, Any]) -> None:
    full, window = layout().groups
    other = replace(layout(), groups=(replace(full, **changes), window))
    with pytest.raises(ConfigError):
        parse_calibration(calibration().to_bytes(), other)
