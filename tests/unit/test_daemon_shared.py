"""Shared memory of the cache server in this process: leases, their limits, and their end."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.constants import (
    DAEMON_LEASE_BYTES_MAX,
    DAEMON_LEASE_S_MAX,
    DAEMON_LEASES_MAX,
    DAEMON_STAGING_BYTES,
    DAEMON_STAGINGS_MAX,
    MIB,
)
from kvtier.wire import (
    Delete,
    Done,
    Hello,
    Lease,
    Leased,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Welcome,
    Write,
)
from kvtier.wire_shared import hung_up
from kvtier_server.credentials import DEFAULT
from kvtier_server.leases import LeaseRoom, Leases, Stagings
from kvtier_server.objects import Held, Objects, namespace_of
from tests.lib.plane import Plane, ShiftedClock, data_plane, leased, pinned, stored, until

SECOND = 1.0
DATA = bytes(range(256)) * 512


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


def there(plane: Plane, lease: Leased) -> bytes:
    return bytes(plane.cache.arena[lease.offset : lease.offset + lease.nbytes])


async def test_a_lease_says_where_the_object_lies(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    lease = await leased(client, 7, b"key")
    region = plane.cache.region_at(lease.offset)
    assert region is not None
    assert lease == Leased(7, Status.OK, "", region.number, lease.offset, len(DATA))
    assert there(plane, lease) == DATA
    assert pinned(plane) == 1
    await client.send(Release((7,)))
    await until(lambda: pinned(plane) == 0)
    # The number may be used again.
    assert (await leased(client, 7, b"key")).status is Status.OK
    await client.close()
    await until(lambda: pinned(plane) == 0)
    counters = plane.plane.counters
    assert (counters.leases, counters.leased_bytes) == (2, 2 * len(DATA))
    assert counters.lost_leases == 1


async def test_b88_what_is_leased_stays_as_it_is(plane: Plane) -> None:
    """Deleted and replaced meanwhile, and memory is wanted: the reader's bytes do not change."""
    client = await stored(plane, b"key", data=DATA)
    lease = await leased(client, 1, b"key")
    await client.send(Delete(2, (b"key",)))
    assert await client.message() == Done(2, Status.OK, "")
    await client.send(Write(3, b"key"), b"x" * len(DATA))
    assert await client.message() == Done(3, Status.OK, "")
    other = await stored(plane, *(b"other %d" % n for n in range(100)), data=b"o" * MIB)
    assert there(plane, lease) == DATA
    again = await leased(client, 4, b"key")
    assert there(plane, again) == b"x" * len(DATA) if again.status is Status.OK else True
    await client.close()
    await other.close()


async def test_what_is_not_there_is_not_leased(plane: Plane) -> None:
    client = await plane.client(version=2)
    assert await leased(client, 1, b"none") == Leased(1, Status.ABSENT, "", 0, 0, 0)
    assert plane.plane.counters.absent == 1
    await client.close()


@pytest.mark.parametrize("numbers", [(1,), (0, 1), (0, 0)])
async def test_a_release_of_no_lease_ends_the_connection(
    plane: Plane, numbers: tuple[int, ...]
) -> None:
    client = await stored(plane, b"key", data=DATA)
    await leased(client, 0, b"key")
    await client.send(Release(numbers))
    refused = await client.message()
    assert isinstance(refused, Refused)
    assert refused.status is Status.CORRUPT
    assert await client.frame() is None
    await client.close()


async def test_leases_of_a_connection_are_bounded(plane: Plane) -> None:
    client = await stored(plane, b"key", data=b"small")
    for number in range(DAEMON_LEASES_MAX):
        assert (await leased(client, number, b"key")).status is Status.OK
    over = await leased(client, DAEMON_LEASES_MAX, b"key")
    assert over == Leased(DAEMON_LEASES_MAX, Status.REFUSED, "too much is leased", 0, 0, 0)
    assert plane.plane.counters.unleased == 1
    # By the socket it is given all the same.
    await client.send(Read(9999, b"key", 0, 5))
    frame = await client.frame()
    assert frame is not None
    assert frame.payload_bytes == 5
    await client.send(Release((0,)))
    assert (await leased(client, DAEMON_LEASES_MAX, b"key")).status is Status.OK
    await client.close()


async def test_all_leases_together_leave_half_of_memory_to_others(plane: Plane) -> None:
    one = await stored(plane, *(b"k%d" % n for n in range(9)), data=b"x" * (4 * MIB - 8192))
    two = await plane.client(version=2)
    clients = [one, two]
    for number in range(8):
        answer = await leased(clients[number % 2], number, b"k%d" % number)
        assert answer.status is Status.OK
    assert (await leased(two, 8, b"k8")).status is Status.REFUSED
    await one.close()
    await until(lambda: pinned(plane) == 4)
    assert (await leased(two, 8, b"k8")).status is Status.OK
    await two.close()


async def test_a_request_with_a_leases_number_gets_none(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    assert (await leased(client, 1, b"key")).status is Status.OK
    assert (await leased(client, 1, b"key")).status is Status.REFUSED
    assert pinned(plane) == 1
    await client.close()


async def test_a_lease_that_is_kept_for_too_long_ends_with_its_connection(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    await leased(client, 1, b"key")
    plane.look(DAEMON_LEASE_S_MAX - SECOND)
    assert pinned(plane) == 1
    plane.look(DAEMON_LEASE_S_MAX + SECOND)
    assert await client.frame() is None
    await until(lambda: pinned(plane) == 0)
    assert plane.plane.counters.lost_leases == 1
    await client.close()


async def test_the_server_hangs_up_before_it_lets_go(plane: Plane) -> None:
    ours, theirs = socket.socketpair()
    seen: list[bool] = []
    transports = theirs.dup()  # It may be open for a while still.
    leases = Leases(LeaseRoom(MIB), ShiftedClock(), theirs)
    clock = plane.clock
    objects = Objects(plane.cache, namespace_of(DEFAULT), clock)
    await (await stored(plane, b"key", data=DATA)).close()
    held = await objects.lease(b"key", deadline=clock.now() + SECOND)
    assert isinstance(held, Held)
    assert leases.hold(1, _Watched(held, lambda: seen.append(hung_up(ours))))
    assert not hung_up(ours)
    assert leases.end() == 1
    assert seen == [True]
    ours.close()
    transports.close()


class _Watched(Held):
    """What is held, and is asked when it is let go."""

    def __init__(self, held: Held, released: object) -> None:
        self.data, self.offset = held.data, held.offset
        self._held, self._released = held, released

    def release(self) -> None:
        assert callable(self._released)
        self._released()
        self._held.release()


def test_a_hang_up_is_seen_behind_what_was_sent_before() -> None:
    ours, theirs = socket.socketpair()
    theirs.send(b"an answer that nobody has read")
    assert not hung_up(ours)
    theirs.close()
    assert hung_up(ours)
    ours.close()


def test_a_connections_bytes_are_bounded() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        leases = Leases(LeaseRoom(4 * DAEMON_LEASE_BYTES_MAX), ShiftedClock(), theirs)
        assert leases.hold(1, _Sized(DAEMON_LEASE_BYTES_MAX))
        assert not leases.hold(2, _Sized(1))
        assert leases.release([1])
        assert leases.hold(2, _Sized(1))
        leases.end()


class _Sized(Held):
    """Something held that is so long."""

    def __init__(self, nbytes: int) -> None:
        self.offset = 0
        self.data = memoryview(bytes(1)) if nbytes == 1 else memoryview(bytes(nbytes))

    def release(self) -> None:
        self.data = self.data[:0]


async def test_who_speaks_version_1_is_served_as_before(plane: Plane) -> None:
    client = await plane.client(hello=False)
    await client.send(Hello(1, 9, b""))
    assert await client.message() == Welcome(2)
    older = await plane.client(hello=False)
    await older.send(Hello(0, 1, b""))
    assert await older.message() == Welcome(1)
    await older.send(Lease(1, b"key"))
    assert isinstance(await older.message(), Refused)
    for each in (client, older):
        await each.close()


async def test_staging_files_are_bounded_and_ones_own(plane: Plane) -> None:
    clock = plane.clock
    ann, ben = (Objects(plane.cache, namespace_of(name), clock) for name in ("ann", "ben"))
    stagings = Stagings()
    made = [stagings.open(ann) for _ in range(DAEMON_STAGINGS_MAX)]
    assert None not in made
    assert stagings.open(ben) is None
    first = made[0]
    assert first is not None
    number = first.file.number
    assert stagings.part(number, 0, DAEMON_STAGING_BYTES, ann) is not None
    for offset, nbytes in [(1, DAEMON_STAGING_BYTES), (2**62, 1), (DAEMON_STAGING_BYTES, 1)]:
        assert stagings.part(number, offset, nbytes, ann) is None
    assert stagings.part(number, 0, 1, ben) is None
    assert stagings.part(number + 1, 0, 1, ann) is None
    stagings.close(first)
    assert stagings.part(number, 0, 1, ann) is None
    again = stagings.open(ben)
    assert again is not None
    for each in (*made[1:], again):
        assert each is not None
        stagings.close(each)


async def test_nothing_is_taken_from_a_file_that_is_not_the_clients(plane: Plane) -> None:
    client = await plane.client(version=2)
    await client.send(Take(1, b"key", 12345, 0, 100))
    assert await client.message() == Done(1, Status.ABSENT, "no such part of a staging area")
    assert plane.plane.counters.unwritten == 1
    await client.close()


async def test_b102_what_lies_in_another_ones_file_is_not_leased(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await stored(plane, b"key", data=DATA)
    region = plane.cache.region_at(0)
    assert region is not None
    another = replace(region, owner=b"somebody else")
    monkeypatch.setattr(plane.cache, "region_at", lambda offset: another if offset >= 0 else None)
    assert (await leased(client, 1, b"key")).status is Status.UNAVAILABLE
    assert pinned(plane) == 0
    await client.close()
