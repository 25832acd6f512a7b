"""What operators do with objects, beyond what is done at once; what is told of a spoiled disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.tenancy.held import Eviction
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig
from kvtier.constants import (
    CONTROL_FINDINGS_MAX,
    CONTROL_OBJECTS_MAX,
    CONTROL_WARMED_AT_ONCE,
    MIB,
)
from kvtier_server import keeper as keeper_module
from kvtier_server.credentials import DEFAULT
from kvtier_server.disk_check import DiskCheck
from kvtier_server.keeper import Keeper
from kvtier_server.messages import told_check
from kvtier_server.objects import Filling, Objects, namespace_of

COUNT = 10
AT_ONCE = 4


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(CacheConfig(64 * MIB))
    yield cache
    cache.check_integrity()
    cache.close()


async def stored(cache: Cache, count: int = COUNT, nbytes: int = 4096) -> list[bytes]:
    """Store objects of ``default``; return their keys."""
    objects = Objects(cache, namespace_of(DEFAULT), SystemClock())
    keys = [b"%d" % number for number in range(count)]
    for key in keys:
        filling = await objects.reserve(key, nbytes, deadline=time.monotonic() + 10)
        assert isinstance(filling, Filling)
        filling.data[:] = bytes(nbytes)
        filling.commit()
    return keys


async def test_what_is_done_at_once_is_bounded_and_evicting_goes_on(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONTROL_OBJECTS_MAX > AT_ONCE
    monkeypatch.setattr(keeper_module, "CONTROL_OBJECTS_MAX", AT_ONCE)
    monkeypatch.setattr(keeper_module, "CONTROL_OBJECTS_AT_ONCE", 3)
    keys = await stored(cache)
    keeper = Keeper(cache, SystemClock())
    assert await keeper.pin(DEFAULT, None, 60.0) == {None: AT_ONCE}
    assert await keeper.unpin(DEFAULT, None) == {True: AT_ONCE}
    assert await keeper.pin(DEFAULT, keys, 60.0) == {None: COUNT}
    assert await keeper.unpin(DEFAULT, keys[2:]) == {True: COUNT - 2}
    evicted = await keeper.evict(DEFAULT, None, ["dram", "disk"])
    assert evicted == {Eviction.EVICTED: COUNT - 2, Eviction.PINNED: 2}
    assert await keeper.evict(DEFAULT, None, ["dram"]) == {Eviction.EVICTED: 0, Eviction.PINNED: 2}


async def test_evicting_all_ends_though_others_store_all_the_while(cache: Cache) -> None:
    await stored(cache)
    over = False

    async def store() -> None:
        while not over:
            await stored(cache, 1)
            await asyncio.sleep(0)

    storing = asyncio.create_task(store())
    async with asyncio.timeout(10):
        evicted = await Keeper(cache, SystemClock()).evict(DEFAULT, None, ["dram"])
    over = True
    await storing
    assert evicted == {Eviction.EVICTED: COUNT}


async def test_a_key_that_is_named_twice_counts_once(cache: Cache) -> None:
    keys = await stored(cache, 2)
    keeper = Keeper(cache, SystemClock())
    assert (await keeper.warm(DEFAULT, [*keys, *keys], 10.0)).warmed == 2
    assert await keeper.remove(DEFAULT, [*keys, *keys]) == (2, 0)
    assert (await keeper.warm(DEFAULT, keys, 10.0)).absent == 2


async def test_warming_takes_half_of_memory_and_its_time(cache: Cache) -> None:
    keys = await stored(cache)
    keeper = Keeper(cache, SystemClock())
    late = await keeper.warm(DEFAULT, keys, -1.0)
    assert (late.warmed, late.late) == (0, COUNT)
    keys = await stored(cache, 48, MIB - 4096)
    warmed = await keeper.warm(DEFAULT, keys, 60.0)
    assert warmed.warmed + warmed.refused == 48
    assert 32 * MIB <= warmed.warmed_bytes <= (32 + CONTROL_WARMED_AT_ONCE) * MIB


async def test_findings_are_shown_up_to_a_limit(tmp_path: Path) -> None:
    for folder in ("shards/00", "incoming", "quarantine", "index"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(CONTROL_FINDINGS_MAX + 1):
        (tmp_path / "shards" / "00" / f"{number}.kvs").write_bytes(b"no shard")
    check = DiskCheck([str(tmp_path)])
    assert told_check(check).state == "none"
    assert check.begin()
    assert not check.begin(), "one reading at a time"
    assert told_check(check).state == "running"
    await check.wait()
    told = told_check(check)
    assert (told.state, told.clean) == ("done", False)
    assert (told.finding_count, len(told.findings)) == (
        CONTROL_FINDINGS_MAX + 1,
        CONTROL_FINDINGS_MAX,
    )
    assert check.begin()
    await check.stop()
    assert check.state == "failed"
