"""Bytes that the rotated codecs have written stay readable, and are written again alike."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.golden import make_rotated

GOLDEN = json.loads(make_rotated.FILE.read_text())


@pytest.mark.parametrize("name", list(GOLDEN))
def test_packs_to_the_golden_bytes(name: str) -> None:
    assert make_rotated.packed(make_rotated.kernels()[name]).hex() == GOLDEN[name]["section"]


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_bytes_come_back_as_the_same_values(name: str) -> None:
    section = bytes.fromhex(GOLDEN[name]["section"])
    restored = make_rotated.unpacked(make_rotated.kernels()[name], section)
    assert hashlib.sha256(restored).hexdigest() == GOLDEN[name]["restored_sha256"]


def test_every_case_has_golden_bytes() -> None:
    assert list(GOLDEN) == list(make_rotated.kernels())
