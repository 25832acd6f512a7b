"""A fill from a remote lets go of its slots when nothing writes to them, even where it breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, RemoteConfig
from kvtier.interfaces import Connector, ReadOutcome
from kvtier.tiers import arrival
from kvtier.tiers.remote import incoming
from kvtier.types import Placement, ReadRequest
from tests.lib.cache_world import CHUNK_BYTES, NAMESPACES, World, prompt
from tests.lib.virtual_time import VirtualTime, virtual_time
from tests.lib.world_remote import WorldRemote

ONE = (Placement(0, 0, 1),)
SLOW_S = 1.0


class SlowBehind(WorldRemote):
    """Gives the start of an object at once, and what lies behind it after a while."""

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        if any(request.offset for request in requests):
            await asyncio.sleep(SLOW_S)
        return await super().read(requests, into)


def opened(time: VirtualTime, connect: Callable[[str], Connector]) -> World:
    config = CacheConfig(
        dram_bytes=8 * CHUNK_BYTES,
        remotes=(RemoteConfig("world://", deadline_s=5.0),),
        slab_bytes=4096,
        workers=ONE,
        pending_deadline_s=1.0,
    )
    draws = random.Random(1)
    world = World(Cache(config, clock=time.loop, connect=connect), time.loop, draws, ONE)
    world.fails = world.weighs = lambda: False
    world.patience_s = lambda: 4 * SLOW_S
    return world


def ended(time: VirtualTime, world: World) -> None:
    """Have what has arrived loaded or computed, and stored."""

    def over() -> bool:
        for request in [*world.requests]:
            world.poll(request)
        for worker in world.workers:
            while worker.inbox:
                world.work(worker)
            world.cache.finish([*worker.outbox])
            worker.outbox.clear()
        return not world.requests

    assert time.loop.pump(over, within_s=10 * SLOW_S), "the request does not end"


def test_slots_are_kept_while_anything_reads_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "REMOTE_STEP_BYTES", 1)
    with virtual_time(lambda _: 0.0) as time:
        remote = SlowBehind(random.Random(1))
        world = opened(time, lambda _: remote)
        world.arrive(NAMESPACES[0], prompt(0, 0, 1), 0)
        ended(time, world)
        assert time.loop.pump(lambda: len(remote.objects) > 1), "nothing is written"
        world.cache.close(timeout_s=5.0)
        time.next_process()

        world = opened(time, lambda _: remote)
        with mock.patch.object(arrival, "verify_section", side_effect=RuntimeError("a bug")) as bug:
            world.arrive(NAMESPACES[0], prompt(0, 0, 1), 0)
            (request,) = world.requests

            def broken() -> bool:
                world.poll(request)
                return bug.called

            assert time.loop.pump(broken, within_s=SLOW_S / 2), "nothing is read"
            time.loop.pass_time(SLOW_S / 4)
            world.poll(request)
            assert request.load is not None, "slots were given away that a read still writes to"
            time.loop.pass_time(SLOW_S)
        ended(time, world)
        assert world.seen["missed: io_error"] == 1
        world.check_quiet()
        world.cache.close(timeout_s=5.0)
