"""Who takes an answer more slowly than any honest client is cut off, and holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier import wire_link
from kvtier.constants import KIB, MIB, WIRE_STALL_S_MAX
from kvtier.wire import Data, Read, Status
from kvtier_server.credentials import DEFAULT
from tests.lib.plane import Client, Plane, data_plane, leased, pinned, stored, until

DATA = bytes(range(256)) * (3 * MIB // 256)
RATE_BYTES = 256 * KIB


@pytest.fixture
async def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr(wire_link, "WIRE_SENT_BYTES_PER_S_MIN", RATE_BYTES)
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


async def reads_some(client: Client, nbytes: int) -> None:
    """Ask for a whole object, and take only so many bytes of the answer."""
    await client.send(Read(7, b"object", 0, len(DATA)))
    await client.skip(nbytes)


async def test_b88_who_takes_an_answer_too_slowly_lets_go_of_all_it_holds(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    slow = await stored(plane, b"object", b"leased", data=DATA)
    assert (await leased(slow, 5, b"leased")).status is Status.OK
    await reads_some(slow, MIB)
    await until(lambda: pinned(plane) == 2)

    plane.look(WIRE_STALL_S_MAX)  # It has not had its time yet.
    assert (pinned(plane), plane.plane.counters.stalled) == (2, 0)
    other = await plane.client()
    await other.send(Read(1, b"object", 0, len(DATA)))
    assert await other.message() == Data(1, Status.OK, "")

    with caplog.at_level(logging.WARNING, "kvtier.daemon"):
        plane.look(WIRE_STALL_S_MAX + len(DATA) / RATE_BYTES)
        await until(lambda: pinned(plane) == 0)
    assert (plane.plane.counters.stalled, plane.plane.counters.lost_leases) == (1, 1)
    assert "is cut off: it takes an answer too slowly" in caplog.text
    await other.send(Read(2, b"object", 0, len(DATA)))
    assert await other.message() == Data(2, Status.OK, "")
    await other.close()
    await slow.close()


async def test_who_takes_enough_of_it_has_its_time(plane: Plane) -> None:
    quick = await stored(plane, b"object", data=DATA)
    await reads_some(quick, 2 * MIB)
    await until(lambda: pinned(plane) == 1)
    plane.look(WIRE_STALL_S_MAX + MIB / RATE_BYTES)
    assert (pinned(plane), plane.plane.counters.stalled) == (1, 0)
    await quick.skip(len(DATA) - 2 * MIB)
    await until(lambda: pinned(plane) == 0)
    plane.look(2 * WIRE_STALL_S_MAX + len(DATA) / RATE_BYTES)  # Nothing is being sent any more.
    assert plane.plane.counters.stalled == 0
    await quick.close()
