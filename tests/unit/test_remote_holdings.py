"""What a listing tells a sole writer, what is deleted when, and the books of one remote."""

from __future__ import annotations

import random

import pytest

from kvtier.constants import LATE_JOBS_MAX, REMOTE_CODECS_MAX
from kvtier.errors import ConnectorRefusedError, ConnectorUnavailableError, DeadlineError
from kvtier.keys import shard_key
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.remote.holdings import Holdings
from kvtier.tiers.remote.tier import RemoteTier
from kvtier.types import ChunkKey, Entry, Features, KeyInfo, ShardId

FIRST, SECOND = ShardId(0, 0, 0), ShardId(0, 0, 1)
BOTH = frozenset({FIRST, SECOND})


def holdings(capacity: int = 100, left: list[ChunkKey] | None = None) -> Holdings:
    told: list[ChunkKey] = [] if left is None else left
    return Holdings(capacity, LRU, FakeClock(), told.append)


def listed(*names: int, nbytes: int = 10) -> list[KeyInfo]:
    return [
        KeyInfo(shard_key(chunk_key(name), shard), nbytes)
        for name in names
        for shard in (FIRST, SECOND)
    ]


def store(held: Holdings, name: int, nbytes: int = 20) -> None:
    record = held.reserve(Entry(chunk_key(name), None, nbytes, 0), b"n", "raw", {FIRST: nbytes})
    assert record is not None
    held.commit(record)


def test_a_listing_is_taken_in_by_chunks() -> None:
    held = holdings()
    before = held.listed
    held.adopt(listed(1, 2, 3))
    assert (before, held.listed) == (False, True)
    assert (len(held.index), held.used_bytes, held.deletions_due) == (3, 60, False)
    record = held.index.ready(chunk_key(2))
    assert record is not None
    assert record.places.keys() == BOTH
    held.check_integrity()


def test_what_is_listed_beyond_the_bound_is_deleted() -> None:
    left: list[ChunkKey] = []
    held = holdings(50, left)
    held.adopt(listed(1, 2, 3))
    assert len(held.index) == 2
    assert [place.nbytes for place in held.take_deletions()] == [10, 10]
    assert held.used_bytes == 40
    assert left == [chunk_key(1)]


def test_a_chunk_that_could_never_fit_is_deleted() -> None:
    held = holdings(50)
    held.adopt(listed(1, nbytes=30))
    assert (len(held.index), len(held.take_deletions())) == (0, 2)


def test_what_is_no_shard_of_ours_is_neither_counted_nor_deleted() -> None:
    held = holdings()
    held.adopt([KeyInfo(b"foreign", 10**9), KeyInfo(b"", 5), *listed(1)])
    assert (held.used_bytes, held.take_deletions()) == (20, [])


def test_what_was_written_while_the_listing_came_is_not_taken_twice() -> None:
    held = holdings()
    store(held, 1)
    held.adopt(listed(1, 2))
    assert (len(held.index), held.used_bytes) == (2, 40)
    held.check_integrity()


def test_a_chunk_that_is_written_again_is_not_deleted_after_it() -> None:
    held = holdings(40)
    store(held, 1)
    store(held, 2)
    store(held, 3)
    assert held.deletions_due
    record = held.reserve(Entry(chunk_key(1), None, 20, 0), b"n", "raw", {FIRST: 20})
    assert record is not None
    assert {place.key for place in held.take_deletions()} == {shard_key(chunk_key(2), FIRST)}
    held.abort(record)
    assert [place.key for place in held.take_deletions()] == [shard_key(chunk_key(1), FIRST)]


def tier(clock: FakeClock) -> RemoteTier:
    books = RemoteTier(0, clock, random.Random(1), ttl_s=60.0, absent_s=2.0)
    books.epochs_known = True
    return books


def test_a_sole_writer_knows_without_asking_once_it_has_listed() -> None:
    books = tier(FakeClock())
    books.holdings = held = holdings()
    assert books.shards(chunk_key(1)) is None
    assert (books.writable, books.state[0]) == (False, "opening")
    held.adopt(listed(1))
    assert (books.writable, *books.state) == (True, "ok", "")
    assert books.shards(chunk_key(1)) == BOTH
    assert books.shards(chunk_key(2)) == frozenset()


def test_what_is_lost_is_lost_in_all_books() -> None:
    books = tier(FakeClock())
    books.holdings = held = holdings()
    held.adopt(listed(1))
    books.lose(chunk_key(1))
    assert books.shards(chunk_key(1)) == frozenset()
    assert (len(held.index), held.deletions_due) == (0, True)


def test_what_was_not_found_while_it_failed_is_asked_for_again() -> None:
    books = tier(FakeClock())
    books.learn(chunk_key(1), frozenset())
    books.learn(chunk_key(2), BOTH)
    books.succeeded()
    assert books.shards(chunk_key(1)) == frozenset()
    books.succeeded(probe=True)
    assert books.shards(chunk_key(1)) is None
    assert books.shards(chunk_key(2)) == BOTH


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (ConnectorUnavailableError("gone"), "failing"),
        (OSError("broken"), "failing"),
        (DeadlineError("late"), "slow"),
        (ConnectorRefusedError("full"), "ok"),
    ],
)
def test_the_state_is_one_word_with_the_fault_behind_it(
    fault: OSError | ConnectorUnavailableError, word: str
) -> None:
    books = tier(FakeClock())
    for _ in range(5):
        books.failed(fault)
    assert books.state[0] == word
    assert (str(fault) in books.state[1]) == (word != "ok")


def test_a_bounded_number_of_answers_may_be_overdue() -> None:
    books = tier(FakeClock())
    books.late_count = LATE_JOBS_MAX - 1
    before = books.answers
    books.late_count = LATE_JOBS_MAX
    assert (before, books.answers, books.state[0]) == (True, False, "slow")


def test_codecs_are_remembered_for_a_bounded_number_of_namespaces() -> None:
    books = tier(FakeClock())
    for number in range(REMOTE_CODECS_MAX + 1):
        books.learn_codec(b"%d" % number, "int4")
    assert books.codec_of(b"0") is None
    assert books.codec_of(b"1") == "int4"


def test_an_access_keeps_a_chunk() -> None:
    left: list[ChunkKey] = []
    held = holdings(40, left)
    store(held, 1)
    store(held, 2)
    held.touch([chunk_key(1), chunk_key(9)], Features())
    store(held, 3)
    assert left == [chunk_key(2)]
