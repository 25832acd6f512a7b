"""The sweep of faults that every connector to a server has to pass: mischief all along its stream.

Bind it by where the server listens, and how a connector is opened to a port and a time limit::

    class TestToyStream(StreamSweep):
        def address(self): return "127.0.0.1", 7171
        def make_connector(self, port, timeout_s): return ToyConnector("127.0.0.1", port, timeout_s)

A proxy between both plays one mischief at a time: at the beginnings of what comes at once, just
behind them, and between. No byte that is read may be wrong, no call may wait for long, and what
is asked afterwards goes well. It needs pytest with pytest-asyncio in its mode ``auto``.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import pytest

from kvtier.constants import MIB
from kvtier.interfaces import Connector
from kvtier.testing.connector_script import Script
from kvtier.testing.stream_proxy import At, Mischief, StreamProxy, Way, stream_proxy
from kvtier.types import ReadRequest

#: Scripts under way at the same time.
TOGETHER: Final = 4
#: What a script may take in all, whatever goes wrong.
SCRIPT_S_MAX: Final = 120.0
#: Where nothing hangs, a busy machine is not taken for silence.
PATIENT_S: Final = 60.0
#: Where something may.
BRIEF_S: Final = 0.5
#: Of places at which a stream may hang, one of so many is tried: each takes its time.
HANGS: Final = 3


def script() -> Script:
    """Return a new script, whose objects nobody else knows."""
    mark = uuid.uuid4().bytes
    sizes = {b"small" + mark: 100, b"middle" + mark: 200_000, b"large" + mark: 2 * MIB + 500}
    whole = [ReadRequest(key, 0, nbytes) for key, nbytes in sizes.items()]
    return Script(sizes, [*whole, ReadRequest(b"large" + mark, MIB - 10, 100_000)])


class StreamSweep(ABC):
    """Tests of a connector to a server that is reached by TCP."""

    #: Bytes at which each mischief is played, each way: more of them find more, and take longer.
    positions = 12
    #: True: a connection that breaks once, behind its login, costs nobody anything.
    heals = False

    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Return where the server listens."""

    @abstractmethod
    def make_connector(self, port: int, timeout_s: float) -> Connector:
        """Open a connector to the server by way of a port of 127.0.0.1, within the event loop.

        Its calls end by themselves within a few times ``timeout_s``. Keys of others may be there.
        """

    async def act(
        self,
        fault: At | None,
        *,
        timeout_s: float = PATIENT_S,
        wrap: Callable[[Connector], Connector] = lambda inner: inner,
    ) -> tuple[Script, StreamProxy]:
        """Run a script through mischief; then another by the same connector, which must go well.

        With no fault there is but one script, whose bytes the proxy has counted.
        """
        marred = script()
        async with stream_proxy(self.address(), fault) as proxy, asyncio.timeout(SCRIPT_S_MAX):
            connector = wrap(self.make_connector(proxy.port, timeout_s))
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

    async def faults(self, mischief: Mischief) -> list[At]:
        """Return mischief at the beginnings of what comes at once, just behind them, between."""
        _, proxy = await self.act(None)
        found = []
        for way in Way:
            starts, end = proxy.starts[way], proxy.passed[way]
            places = {*starts, *(start + 3 for start in starts), end - 1}
            ends = [*starts[1:], end]
            places |= {(low + high) // 2 for low, high in zip(starts, ends, strict=True)}
            ordered = sorted(place for place in places if place < end)
            stride = max(1, len(ordered) // self.positions)
            found += [At(mischief, way, place) for place in ordered[::stride]]
        return found

    async def login_bytes(self) -> dict[Way, int]:
        """Return what has gone each way once there is a connection and one answer on it."""
        async with stream_proxy(self.address()) as proxy:
            connector = self.make_connector(proxy.port, PATIENT_S)
            await connector.contains([b"anything"])
            passed = dict(proxy.passed)
            await connector.close()
        return passed

    async def test_without_mischief_the_script_goes_well(self) -> None:
        """Else a sweep would prove nothing."""
        marred, proxy = await self.act(None)
        marred.assert_well()
        assert proxy.passed[Way.DOWN] > 2 * MIB
        assert proxy.passed[Way.UP] > 2 * MIB

    @pytest.mark.parametrize("mischief", [Mischief.RESET, Mischief.END, Mischief.DRIBBLE])
    async def test_b80_b83_wherever_the_stream_breaks_no_byte_is_wrong(
        self, mischief: Mischief
    ) -> None:
        """Neither is what comes later taken for an answer to what was asked before."""
        login = await self.login_bytes()

        async def one(fault: At) -> None:
            marred, _ = await self.act(fault)
            within = fault.position > login[fault.way]
            if mischief is Mischief.DRIBBLE or (self.heals and within):
                marred.assert_well()

        await in_turns(one, await self.faults(mischief))

    async def test_wherever_the_stream_hangs_nobody_waits_for_long(self) -> None:
        """Nothing more comes, and nobody says so."""

        async def one(fault: At) -> None:
            began = asyncio.get_running_loop().time()
            await self.act(fault, timeout_s=BRIEF_S)
            assert asyncio.get_running_loop().time() - began < SCRIPT_S_MAX / 2

        found = await self.faults(Mischief.HANG)
        await in_turns(one, found[::HANGS])


async def in_turns(one: Callable[[At], Awaitable[None]], found: Sequence[At]) -> None:
    """Do it for each of the faults, a few at a time."""
    room = asyncio.Semaphore(TOGETHER)

    async def with_room(fault: At) -> None:
        async with room:
            await one(fault)

    await asyncio.gather(*(with_room(fault) for fault in found))
