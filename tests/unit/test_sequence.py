"""A request's tokens, hashed as they come."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.errors import ConfigError, LayoutError
from kvtier.types import Features, GroupKind, Hint, KVGroup, KVLayout, Namespace

GROUP = KVGroup(GroupKind.FULL, (0,), kv_heads=1, k_dim=8, v_dim=8, dtype="float32")
NAMESPACE = Namespace("weights", KVLayout((GROUP,), chunk_tokens=4))
ROOT = bytes(range(32))


def chained(tokens: tuple[int, ...]) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - 3, 4):
        parent = keys[-1] if keys else ROOT
        keys.append(
            hashlib.sha256(parent + struct.pack("<4i", *tokens[start : start + 4])).digest()
        )
    return keys


def test_complete_chunks_are_keyed_as_tokens_come() -> None:
    sequence = Sequence(NAMESPACE, ROOT)
    assert (sequence.token_count, sequence.chunk_keys, sequence.chunk_tokens) == (0, [], 4)
    tokens: tuple[int, ...] = ()
    for more in ((), (1,), (2, 3), (4,), (5, 6, 7, 8), (9, 10, 11), (12, 13), tuple(range(21))):
        sequence.append(more)
        tokens += more
        assert sequence.token_count == len(tokens)
        assert sequence.chunk_keys == chained(tokens)
    assert len(sequence.chunk_keys) == 8


def test_keys_once_given_do_not_change() -> None:
    sequence = Sequence(NAMESPACE, ROOT)
    sequence.append(range(8))
    before = list(sequence.chunk_keys)
    sequence.append(range(8))
    assert sequence.chunk_keys[:2] == before


def test_the_parent_of_a_chunk_is_the_chunk_before_it() -> None:
    sequence = Sequence(NAMESPACE, ROOT)
    assert sequence.entry_parent(0) is None
    sequence.append(range(10))
    keys = sequence.chunk_keys
    assert [sequence.entry_parent(index) for index in range(3)] == [None, keys[0], keys[1]]
    for index in (-1, 3):
        with pytest.raises(AssertionError):
            sequence.entry_parent(index)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e300])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    """Not a number in the order of ends would keep all other chunks from ever leaving."""
    with pytest.raises(ConfigError, match="ttl_s"):
        Sequence(NAMESPACE, ROOT, features=Features(ttl_s=seconds))
    with pytest.raises(ConfigError, match="pin_s"):
        Sequence(NAMESPACE, ROOT, features=Features(pin_s=seconds))


def test_a_bad_token_adds_nothing() -> None:
    sequence = Sequence(NAMESPACE, ROOT)
    sequence.append((1, 2, 3))
    for bad in ((4, -1), (4, 2**31)):
        with pytest.raises(LayoutError, match="index 1"):
            sequence.append(bad)
    sequence.append((4,))
    assert sequence.token_count == 4
    assert sequence.chunk_keys == chained((1, 2, 3, 4))


def test_it_carries_what_it_was_made_of() -> None:
    features = Features(turn=3, hint=Hint.DONE)
    sequence = Sequence(NAMESPACE, ROOT, features=features)
    assert (sequence.namespace, sequence.root) == (NAMESPACE, ROOT)
    assert sequence.features == features
    assert Sequence(NAMESPACE, ROOT).features == Features()


def test_a_root_is_a_digest() -> None:
    with pytest.raises(ConfigError, match="31 bytes"):
        Sequence(NAMESPACE, bytes(31))
