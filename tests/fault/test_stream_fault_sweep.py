"""Redis and the cache server behind a proxy that does mischief at one byte after the other.

A connector believes the bytes that come: what lies in a shard is found by the shard's checksums. So
where bytes are changed under way, we look through ``Encrypted``, which finds it too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvtier.constants import MIB
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.types import ReadRequest
from kvtier_connectors.decorators.encrypted import Encrypted
from tests.lib.connector_script import Script
from tests.lib.daemon import daemon
from tests.lib.redis_servers import redis_server
from tests.lib.stream_proxy import At, Mischief, StreamProxy, Way, stream_proxy

#: Scripts under way at the same time.
TOGETHER = 4
#: What a script may take in all, whatever goes wrong.
SCRIPT_S_MAX = 120.0
#: Where nothing hangs, a busy machine is not taken for silence.
PATIENT_S = 60.0
#: Where something may.
BRIEF_S = 0.5
#: Bytes at which each mischief is played, each way, in a run of normal size.
POSITIONS = 12


@dataclass(frozen=True)
class Store:
    """A server, and how a connector to it through a port is written."""

    port: int
    url: Callable[[int, float], str]
    #: A connection that breaks once after its login costs nobody anything.
    heals: bool

    def open(self, port: int, timeout_s: float = PATIENT_S) -> Connector:
        return connect(self.url(port, timeout_s))


def options(timeout_s: float) -> str:
    return f"connections=1&timeout_s={timeout_s}&connect_timeout_s={2 * timeout_s}"


def redis_url(port: int, timeout_s: float) -> str:
    return f"redis://127.0.0.1:{port}?{options(timeout_s)}&prefix={uuid.uuid4().hex}:"


def server_url(port: int, timeout_s: float) -> str:
    return f"kvtier://127.0.0.1:{port}?{options(timeout_s)}"


@pytest.fixture(scope="module", params=["redis", "kvtier"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "redis":
        with redis_server(tmp_path_factory.mktemp("redis")) as server:
            yield Store(server.port, redis_url, heals=True)
        return
    with daemon("--dram=256MiB") as running:
        yield Store(int(running.urls[0].rpartition(":")[2]), server_url, heals=False)
        assert running.get("/v1/stats")["connections"]["inflight_bytes"] == 0
        assert running.stop() == 0


class Key:
    """The same key for everybody."""

    def key(self, tenant: str) -> bytes:
        return bytes(range(32))


def script() -> Script:
    """A new script, whose objects nobody else knows."""
    mark = uuid.uuid4().bytes
    sizes = {b"small" + mark: 100, b"middle" + mark: 200_000, b"large" + mark: 2 * MIB + 500}
    whole = [ReadRequest(key, 0, nbytes) for key, nbytes in sizes.items()]
    return Script(sizes, [*whole, ReadRequest(b"large" + mark, MIB - 10, 100_000)])


def encrypted(connector: Connector) -> Connector:
    return Encrypted(connector, Key(), "tenant")


async def act(
    store: Store,
    fault: At | None,
    *,
    timeout_s: float = PATIENT_S,
    wrap: Callable[[Connector], Connector] = lambda inner: inner,
) -> tuple[Script, StreamProxy]:
    """Run a script through mischief; then another by the same connector, which must go well.

    With no fault there is but one script, whose bytes the proxy has counted.
    """
    marred = script()
    target = ("127.0.0.1", store.port)
    async with stream_proxy(target, fault) as proxy, asyncio.timeout(SCRIPT_S_MAX):
        connector = wrap(store.open(proxy.port, timeout_s))
        try:
            await marred.run(connector)
            if fault is not None and timeout_s == PATIENT_S:
                proxy.calm()
                again = script()
                await again.run(connector)
                again.assert_well()
                await again.clear_up(connector)
            await marred.clear_up(connector)
        finally:
            await connector.close()
    return marred, proxy


async def in_turns(one: Callable[[At], Awaitable[None]], found: Sequence[At]) -> None:
    """Do it for each of the faults, a few at a time."""
    room = asyncio.Semaphore(TOGETHER)

    async def with_room(fault: At) -> None:
        async with room:
            await one(fault)

    await asyncio.gather(*(with_room(fault) for fault in found))


async def faults(store: Store, mischief: Mischief, scale: int) -> list[At]:
    """Mischief at the beginnings of what comes at once, just behind them, and between."""
    _, proxy = await act(store, None)
    found = []
    for way in Way:
        starts, end = proxy.starts[way], proxy.passed[way]
        places = {*starts, *(start + 3 for start in starts), end - 1}
        places |= {(low + high) // 2 for low, high in zip(starts, [*starts[1:], end], strict=True)}
        ordered = sorted(place for place in places if place < end)
        stride = max(1, len(ordered) // (POSITIONS * scale))
        found += [At(mischief, way, place) for place in ordered[::stride]]
    return found


async def login_bytes(store: Store) -> dict[Way, int]:
    """Return what has gone each way once there is a connection and one answer on it."""
    async with stream_proxy(("127.0.0.1", store.port)) as proxy:
        connector = store.open(proxy.port)
        await connector.contains([b"anything"])
        passed = dict(proxy.passed)
        await connector.close()
    return passed


async def test_without_mischief_the_script_goes_well(store: Store) -> None:
    marred, proxy = await act(store, None)
    marred.assert_well()
    assert proxy.passed[Way.DOWN] > 2 * MIB
    assert proxy.passed[Way.UP] > 2 * MIB


@pytest.mark.parametrize("mischief", [Mischief.RESET, Mischief.END, Mischief.DRIBBLE])
async def test_b80_b83_wherever_the_stream_breaks_no_byte_is_wrong(
    store: Store, mischief: Mischief, scale: int
) -> None:
    """Neither is what comes later taken for an answer to what was asked before."""
    login = await login_bytes(store)

    async def one(fault: At) -> None:
        marred, _ = await act(store, fault)
        within = fault.position > login[fault.way]
        if mischief is Mischief.DRIBBLE or (store.heals and within):
            marred.assert_well()

    await in_turns(one, await faults(store, mischief, scale))


@pytest.mark.parametrize("mischief", [Mischief.FLIP, Mischief.GARBAGE])
async def test_b78_wherever_a_byte_is_changed_nothing_wrong_is_believed(
    store: Store, mischief: Mischief, scale: int
) -> None:
    async def one(fault: At) -> None:
        await act(store, fault, timeout_s=BRIEF_S, wrap=encrypted)

    await in_turns(one, await faults(store, mischief, scale))


async def test_wherever_the_stream_hangs_nobody_waits_for_long(store: Store, scale: int) -> None:
    async def one(fault: At) -> None:
        began = asyncio.get_running_loop().time()
        await act(store, fault, timeout_s=BRIEF_S)
        assert asyncio.get_running_loop().time() - began < SCRIPT_S_MAX / 2

    found = await faults(store, Mischief.HANG, scale)
    await in_turns(one, found[:: 1 if scale > 1 else 3])
