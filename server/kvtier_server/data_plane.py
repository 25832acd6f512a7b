"""The data plane: listens, lets clients in within limits, ends those that stall, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Collection, Sequence
from typing import Final

from kvtier.cache.cache import Cache
from kvtier.constants import DAEMON_BYTES_MAX, DAEMON_SHARE_BYTES, WIRE_STALL_S_MAX
from kvtier.interfaces import Clock
from kvtier_server.acceptor import Acceptor
from kvtier_server.budget import Budget
from kvtier_server.counters import Counters
from kvtier_server.credentials import Door
from kvtier_server.objects import Objects, namespace_of
from kvtier_server.refusals import Refusals
from kvtier_server.session import Session
from kvtier_server.settings import Address
from kvtier_server.shared import Sharing
from kvtier_server.turns import Turns

_log = logging.getLogger("kvtier.daemon")

_LOOK_S: Final = 1.0
#: Connections that are looked after before others have their turn.
_LOOK_COUNT: Final = 256
_DRAIN_LOOK_S: Final = 0.05


class DataPlane:
    """All connections of a server. Belongs to one event loop."""

    def __init__(
        self,
        cache: Cache,
        door: Door,
        clock: Clock,
        *,
        connections_max: int,
        idle_s: float,
    ) -> None:
        self.clock = clock
        self.budget = Budget(DAEMON_BYTES_MAX, DAEMON_SHARE_BYTES)
        self.counters = Counters()
        #: What clients on Unix sockets share; None: the cache's memory is in no files.
        self.sharing = Sharing(len(cache.arena)) if cache.region_at(0) is not None else None
        self._cache = cache
        self._door = door
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._objects: dict[str, Objects] = {}
        self._turns = Turns()
        self._refusals, self._cuts = Refusals("refused"), Refusals("cut off")
        self._sessions: set[Session] = set()
        self._acceptors: list[Acceptor] = []
        self._looking: asyncio.Task[None] | None = None
        self._draining = False
        self._all_left = asyncio.Event()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._sessions)

    @property
    def sessions(self) -> Collection[Session]:
        """Whose connections are open now."""
        return self._sessions

    @property
    def credentials(self) -> Collection[str]:
        """Whoever has come in since the start."""
        return self._objects.keys()

    @property
    def draining(self) -> bool:
        """True once it has begun to stop."""
        return self._draining

    def listen(self, bound: socket.socket, tls: ssl.SSLContext | None) -> str:
        """Listen on a bound socket; return the address as a client names it."""
        unix = bound.family == socket.AF_UNIX
        made = Acceptor(
            bound, lambda: Session(self, unix=unix).link, None if unix else tls, self._refused
        )
        self._acceptors.append(made)
        if unix:
            return f"kvtier+unix://{bound.getsockname()}"
        host, port = bound.getsockname()[:2]
        return f"{'kvtier' if tls is None else 'kvtiers'}://{Address(host, port)}"

    def start(self) -> None:
        """Begin to look after connections that say nothing."""
        self._looking = asyncio.get_running_loop().create_task(self._look_after())

    async def drain(self, seconds: float) -> None:
        """Let nobody in, let what runs finish within the time, cut off what is left."""
        self._draining = True
        for acceptor in self._acceptors:
            acceptor.close()
        until_s = self.clock.now() + seconds
        while self._sessions and self.clock.now() < until_s:
            for session in [each for each in self._sessions if each.idle]:
                session.refuse("the server stops")
            await self._wait_until_left(_DRAIN_LOOK_S)
        for session in list(self._sessions):
            session.link.abort()
        await self._wait_until_left(_LOOK_S)
        for acceptor in self._acceptors:
            await acceptor.ended(_DRAIN_LOOK_S)
        if self._looking is not None:
            self._looking.cancel()

    def change(self, door: Door, connections_max: int, idle_s: float) -> None:
        """Go by these from now on; whoever came in by a way that is closed is sent away."""
        lost = [self._objects.get(name) for name in self._door.lost(door)]
        self._door, self._connections_max, self._idle_s = door, connections_max, idle_s
        for session in list(self._sessions):
            if session.objects is not None and session.objects in lost:
                session.refuse("its credential is withdrawn")

    async def _wait_until_left(self, seconds: float) -> None:
        """Wait until there is no session any more, so long at most."""
        self._all_left.clear()
        if self._sessions:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._all_left.wait()

    def admit(self, token: bytes, uid: int | None, certificate: str | None) -> Objects | None:
        """See ``Plane``."""
        name = self._door.credential(token, uid, certificate)
        if name is None:
            return None
        if name not in self._objects:
            self._objects[name] = Objects(self._cache, namespace_of(name), self.clock, self._turns)
        return self._objects[name]

    def enter(self, session: Session) -> str:
        """See ``Plane``."""
        self._sessions.add(session)
        if self._draining:
            return "the server stops"
        if len(self._sessions) > self._connections_max:
            why = f"{self._connections_max} connections are open, which is the limit"
            self.turned_away(session, why)
            return why
        self.counters.accepted += 1
        return ""

    def turned_away(self, session: Session, why: str) -> None:
        """See ``Plane``."""
        self._refused(session.peer, why)

    def _refused(self, peer: str, why: str) -> None:
        self.counters.refused += 1
        if line := self._refusals.line(peer, why, self.clock.now()):
            _log.warning("%s", line)

    def cut(self, session: Session, why: str) -> None:
        """See ``Plane``."""
        self.counters.stalled += 1
        if line := self._cuts.line(session.peer, why, self.clock.now()):
            _log.warning("%s", line)
        session.link.abort()

    def left(self, session: Session) -> None:
        """See ``Plane``."""
        self.budget.forget(session)
        self._sessions.discard(session)
        if not self._sessions:
            self._all_left.set()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            sessions = list(self._sessions)
            for start in range(0, len(sessions), _LOOK_COUNT):
                self._look_at(sessions[start : start + _LOOK_COUNT])
                await asyncio.sleep(0)

    def look(self) -> None:
        """End connections that stall in a frame, never say who they are, or want nothing.

        And those that hold a lease, or an object that they are sent, for too long.
        """
        self._look_at(list(self._sessions))

    def _look_at(self, sessions: Sequence[Session]) -> None:
        now_s = self.clock.now()
        for session in sessions:
            link = session.link
            silent_s = now_s - link.received_s
            # Nor is it waited for long that one who is sent away reads why.
            outside = link.gone or not session.welcomed
            if outside and silent_s > WIRE_STALL_S_MAX:
                self.cut(session, "it does not say who it is, or does not hang up")
            elif link.stalled(now_s):
                self.cut(session, "a frame of it does not come to its end")
            elif session.overdue(now_s):
                self.cut(session, "it holds a lease for too long")
            elif link.takes_little(now_s):
                self.cut(session, "it takes an answer too slowly")
            elif session.idle and silent_s > self._idle_s:
                session.refuse("nothing was asked for a long time")
