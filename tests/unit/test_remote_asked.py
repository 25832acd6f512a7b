"""What is believed of a remote, what may be in its answers, and what goes into one call."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvtier.constants import REMOTE_ASK_CHUNKS_MAX, REMOTE_ASK_CHUNKS_MIN
from kvtier.errors import ConnectorDataError, ConnectorUnavailableError
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.remote.answers import checked_found, checked_reads, checked_writes
from kvtier.tiers.remote.asked import Asked
from kvtier.tiers.remote.batches import ask_count, batch_count
from kvtier.types import ReadRequest, ShardId, WriteItem

BOTH = frozenset({ShardId(0, 0, 0), ShardId(0, 0, 1)})
NOTHING: frozenset[ShardId] = frozenset()
READS = [ReadRequest(b"k%d" % number, 0, 100) for number in range(3)]
ITEMS = [WriteItem(b"k%d" % number, memoryview(b"data")) for number in range(3)]


def asked(chunks_max: int = 100) -> Asked:
    return Asked(there_s=60.0, absent_s=2.0, chunks_max=chunks_max)


def test_an_answer_is_believed_for_its_time_and_no_longer() -> None:
    known = asked()
    known.learn(chunk_key(1), BOTH, 10.0)
    known.learn_absent(chunk_key(2), 10.0)
    assert known.shards(chunk_key(1), 69.9) == BOTH
    assert known.shards(chunk_key(1), 70.0) is None
    assert known.shards(chunk_key(2), 11.9) == NOTHING
    assert known.shards(chunk_key(2), 12.0) is None
    assert known.shards(chunk_key(3), 10.0) is None


def test_the_latest_answer_counts() -> None:
    known = asked()
    known.learn(chunk_key(1), BOTH, 0.0)
    known.learn_absent(chunk_key(1), 1.0)
    assert known.shards(chunk_key(1), 1.5) == NOTHING
    known.learn(chunk_key(1), BOTH, 2.0)
    assert known.shards(chunk_key(1), 2.5) == BOTH


def test_a_remote_that_comes_back_is_asked_for_what_it_did_not_find() -> None:
    known = asked()
    known.learn(chunk_key(1), BOTH, 0.0)
    known.learn_absent(chunk_key(2), 0.0)
    known.forget_absent()
    assert known.shards(chunk_key(1), 0.5) == BOTH
    assert known.shards(chunk_key(2), 0.5) is None


def test_knowledge_is_bounded_and_the_oldest_is_forgotten() -> None:
    known = asked(chunks_max=4)
    for number in range(4):
        known.learn(chunk_key(number), BOTH, 0.0)
    known.learn(chunk_key(0), BOTH, 0.0)
    known.learn_absent(chunk_key(9), 0.0)
    assert len(known) == 4
    assert [number for number in range(4) if known.shards(chunk_key(number), 0.0)] == [0, 2, 3]


def test_few_are_asked_for_first_and_then_as_many_as_were_there() -> None:
    assert ask_count(0) == ask_count(REMOTE_ASK_CHUNKS_MIN) == REMOTE_ASK_CHUNKS_MIN
    assert ask_count(200) == 200
    assert ask_count(10**6) == REMOTE_ASK_CHUNKS_MAX


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([], 0), ([5], 1), ([50], 1), ([4, 4, 4], 2), ([1] * 9, 4), ([50, 1], 1)],
)
def test_a_batch_holds_to_its_bounds_and_takes_at_least_one(sizes: list[int], count: int) -> None:
    assert batch_count(sizes, items_max=4, bytes_max=10) == count


@pytest.mark.parametrize("odd", [math.nan, 1e2, -1, 101, True, False, "100", b"", [100]])
def test_b81_a_size_that_cannot_be_is_an_error_of_its_own_read(odd: Any) -> None:
    first, second, third = checked_reads(READS, [100, odd, None])
    assert (first, third) == (100, None)
    assert isinstance(second, ConnectorDataError)


@pytest.mark.parametrize("outcomes", [[100, 100], [100] * 4, [], None, iter([1, 2, 3]), 3])
def test_b74_half_a_batch_is_no_answer_at_all(outcomes: Any) -> None:
    with pytest.raises(ConnectorDataError):
        checked_reads(READS, outcomes)
    with pytest.raises(ConnectorDataError):
        checked_writes(ITEMS, outcomes)
    with pytest.raises(ConnectorDataError):
        checked_found([b"k0", b"k1", b"k2"], outcomes)


def test_what_an_answer_may_be_passes_through() -> None:
    fault = ConnectorUnavailableError("away")
    assert checked_reads(READS, [0, fault, 7]) == [0, fault, 7]
    assert checked_writes(ITEMS, (None, fault, None)) == [None, fault, None]


def test_a_write_is_not_done_because_something_was_answered() -> None:
    outcomes = checked_writes(ITEMS, [True, 0, None])
    assert [type(outcome) for outcome in outcomes] == [
        ConnectorDataError,
        ConnectorDataError,
        type(None),
    ]


def test_only_true_is_there() -> None:
    assert checked_found([b"a", b"b", b"c"], [True, 1, None]) == [True, False, False]
