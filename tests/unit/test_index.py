"""Records pass through their states; pins decide when a place is given back."""

from __future__ import annotations

import pytest

from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.types import Entry, ShardId

SHARD = ShardId(0, 0, 0)


class Room:
    def __init__(self) -> None:
        self.reclaimed: list[Record[str]] = []
        self.index: TierIndex[str] = TierIndex(self.reclaimed.append)

    def add(self, name: object, *, ready: bool = True) -> Record[str]:
        entry = Entry(chunk_key(name), None, 4096, 0)
        record = Record(entry, b"n" * 32, "raw", {SHARD: str(name)})
        self.index.add(record)
        if ready:
            self.index.set_ready(record)
        self.index.check_integrity()
        return record


@pytest.fixture
def room() -> Room:
    return Room()


def test_only_what_is_ready_may_be_read(room: Room) -> None:
    record = room.add("a", ready=False)
    assert room.index.get(chunk_key("a")) is record
    assert room.index.ready(chunk_key("a")) is None
    assert room.index.pinned(chunk_key("a")), "what is being filled must stay"
    room.index.set_ready(record)
    assert room.index.ready(chunk_key("a")) is record
    assert not room.index.pinned(chunk_key("a"))
    room.index.detach(record)
    assert room.index.get(chunk_key("a")) is None
    assert room.index.ready(chunk_key("a")) is None
    assert not room.index.pinned(chunk_key("a"))


def test_an_unpinned_record_is_reclaimed_when_it_is_detached(room: Room) -> None:
    record = room.add("a")
    room.index.detach(record)
    assert room.reclaimed == [record]
    assert record.state is State.LEAVING
    assert room.index.leaving_count == 0


def test_a_pinned_record_is_reclaimed_by_its_last_user(room: Room) -> None:
    record = room.add("a")
    first, second = (room.index.lease([record]) for _ in range(2))
    room.index.detach(record)
    assert (room.index.leaving_count, room.index.pinned_count) == (1, 1)
    assert list(room.index.leaving) == [record]
    first.release()
    first.release()
    assert room.reclaimed == []
    room.index.check_integrity()
    second.release()
    assert room.reclaimed == [record]
    assert (room.index.leaving_count, room.index.pinned_count) == (0, 0)
    room.index.check_integrity()


def test_what_is_being_filled_may_leave_too(room: Room) -> None:
    record = room.add("a", ready=False)
    room.index.pin(record)
    room.index.detach(record)
    room.index.unpin(record)
    assert room.reclaimed == [record]


def test_a_key_may_come_again_while_its_old_record_is_read(room: Room) -> None:
    old = room.add("a")
    lease = room.index.lease([old])
    room.index.detach(old)
    new = room.add("a")
    assert room.index.ready(chunk_key("a")) is new
    assert (len(room.index), room.index.leaving_count) == (1, 1)
    lease.release()
    assert room.reclaimed == [old]
    assert room.index.ready(chunk_key("a")) is new


def test_pins_are_counted_by_chunk(room: Room) -> None:
    records = [room.add(name) for name in range(3)]
    lease = room.index.lease([*records, records[0]])
    assert room.index.pinned_count == 3
    assert [record.pins for record in records] == [2, 1, 1]
    lease.release()
    assert room.index.pinned_count == 0
    assert [record.pins for record in records] == [0, 0, 0]


def test_iteration_and_length_tell_of_what_has_a_key(room: Room) -> None:
    records = [room.add(name, ready=name % 2 == 0) for name in range(4)]
    room.index.detach(records[0])
    assert len(room.index) == 3
    assert list(room.index) == records[1:]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda room, record: room.index.unpin(record),
        lambda room, record: room.index.set_ready(record),
        lambda room, record: room.index.add(record),
        lambda room, record: (room.index.detach(record), room.index.detach(record)),
        lambda room, record: room.add(record.places[SHARD]),
    ],
    ids=["unpinned too often", "ready twice", "added ready", "detached twice", "one key twice"],
)
def test_mistakes_are_bugs(room: Room, mistake: object) -> None:
    record = room.add("a")
    assert callable(mistake)
    with pytest.raises(AssertionError):
        mistake(room, record)


def test_integrity_finds_what_was_changed_elsewhere(room: Room) -> None:
    record = room.add("a")
    record.pins = 1
    with pytest.raises(AssertionError, match="pinned chunks"):
        room.index.check_integrity()
    record.pins = 0
    record.state = State.LEAVING
    with pytest.raises(AssertionError, match="leaving"):
        room.index.check_integrity()
