"""What the cache server tells of hits and of what was asked for: a pair that belongs together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.constants import DAEMON_LEASES_MAX
from kvtier.wire import Lease, Leased, Read, Status
from kvtier_server.credentials import DEFAULT
from kvtier_server.figures import Snapshot, stats_of
from kvtier_server.keeper import Keeper
from tests.lib.plane import Plane, data_plane, leased, stored


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


def told(plane: Plane) -> dict[str, Any]:
    return stats_of(
        Snapshot(
            cache=plane.cache.stats(),
            counters=plane.plane.counters,
            connections=plane.plane.connections,
            inflight_bytes=0,
            stopped_connections=0,
            uptime_s=1.0,
            draining=False,
        )
    )


async def test_b163_hits_and_misses_make_up_what_was_asked_for(plane: Plane) -> None:
    client = await stored(plane, b"key", data=b"small")
    for number in range(3):
        await client.send(Read(number, b"none", 0, 5))
        await client.message()
    for number in range(2):
        await client.send(Read(number, b"key", 0, 5))
        await client.message()
    now = told(plane)
    assert (now["prompt_tokens"], now["hit_tokens"]) == (5, {"dram": 2})
    assert now["tiers"][0]["miss_tokens"] == {"absent": 3}
    await client.close()


async def test_b161_no_more_is_ever_given_than_was_asked_for(plane: Plane) -> None:
    """A lease in vain is followed by a read, and what is warmed was asked for by nobody."""
    client = await stored(plane, b"key", data=b"small")
    for number in range(DAEMON_LEASES_MAX):
        assert (await leased(client, number, b"key")).status is Status.OK
    await client.send(Lease(DAEMON_LEASES_MAX, b"key"))
    refused = await client.message()
    assert isinstance(refused, Leased)
    assert refused.status is Status.REFUSED
    await client.send(Read(9999, b"key", 0, 5))
    await client.frame()
    warmed = await Keeper(plane.cache, plane.clock).warm(DEFAULT, [b"key", b"none"], 1.0)
    assert (warmed.warmed, warmed.absent) == (1, 1)
    now = told(plane)
    assert now["hit_tokens"] == {"dram": DAEMON_LEASES_MAX + 3}
    assert now["prompt_tokens"] == DAEMON_LEASES_MAX + 4
    await client.close()
