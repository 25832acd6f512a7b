"""The data plane: listens, lets clients in within limits, ends those that stall, drains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from kvtier.cache.cache import Cache
from kvtier.constants import DAEMON_BYTES_MAX, WIRE_STALL_S_MAX
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock
from kvtier.wire_link import Link
from kvtier_server.budget import Budget
from kvtier_server.counters import Counters
from kvtier_server.credentials import Door
from kvtier_server.objects import Objects, namespace_of
from kvtier_server.session import Session
from kvtier_server.settings import Address

_LOOK_S: Final = 1.0
_DRAIN_LOOK_S: Final = 0.05
_BACKLOG: Final = 1024
#: Connections beyond the limit that are being told so; what comes on top is cut off.
_REFUSALS_MAX: Final = 64


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
        open_to_all: bool = False,
    ) -> None:
        """``open_to_all`` lets other users reach Unix sockets, where the door decides."""
        self.clock = clock
        self.budget = Budget(DAEMON_BYTES_MAX)
        self.counters = Counters()
        self._cache = cache
        self._door = door
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._open_to_all = open_to_all
        self._objects: dict[str, Objects] = {}
        self._sessions: set[Session] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._paths: list[str] = []
        self._looking: asyncio.Task[None] | None = None
        self._draining = False
        self._all_left = asyncio.Event()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._sessions)

    @property
    def draining(self) -> bool:
        """True once it has begun to stop."""
        return self._draining

    async def listen(self, address: Address, tls: ssl.SSLContext | None) -> str:
        """Listen; return the address as a client names it. Raises ``ConfigError``."""
        try:
            if address.path:
                return await self._listen_unix(address.path)
            return await self._listen_tcp(address, tls)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"--listen = {str(address)!r}: cannot listen: {why}") from error

    async def _listen_unix(self, path: str) -> str:
        bound = _bound_unix(path, 0o666 if self._open_to_all else 0o600)
        self._paths.append(path)
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: self._accepted(unix=True), sock=bound, backlog=_BACKLOG
        )
        self._servers.append(server)
        return f"kvtier+unix://{path}"

    async def _listen_tcp(self, address: Address, tls: ssl.SSLContext | None) -> str:
        server = await asyncio.get_running_loop().create_server(
            lambda: self._accepted(unix=False),
            address.host,
            address.port,
            ssl=tls,
            ssl_handshake_timeout=WIRE_STALL_S_MAX if tls is not None else None,
            backlog=_BACKLOG,
            reuse_address=True,
        )
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        scheme = "kvtier" if tls is None else "kvtiers"
        return f"{scheme}://{Address(address.host, port)}"

    def start(self) -> None:
        """Begin to look after connections that say nothing."""
        self._looking = asyncio.get_running_loop().create_task(self._look_after())

    async def drain(self, seconds: float) -> None:
        """Let nobody in, let what runs finish within the time, cut off what is left."""
        self._draining = True
        for server in self._servers:
            server.close()
        self._remove_paths()
        until_s = self.clock.now() + seconds
        while self._sessions and self.clock.now() < until_s:
            for session in [each for each in self._sessions if each.idle]:
                session.refuse("the server stops")
            await self._wait_until_left(_DRAIN_LOOK_S)
        for session in list(self._sessions):
            session.link.abort()
        await self._wait_until_left(_LOOK_S)
        if self._looking is not None:
            self._looking.cancel()

    def _remove_paths(self) -> None:
        for path in self._paths:
            Path(path).unlink(missing_ok=True)
        self._paths.clear()

    async def _wait_until_left(self, seconds: float) -> None:
        """Wait until there is no session any more, so long at most."""
        self._all_left.clear()
        if self._sessions:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._all_left.wait()

    def admit(self, token: bytes, uid: int | None) -> Objects | None:
        """See ``Plane``."""
        name = self._door.credential(token, uid)
        if name is None:
            return None
        if name not in self._objects:
            self._objects[name] = Objects(self._cache, namespace_of(name), self.clock)
        return self._objects[name]

    def left(self, session: Session) -> None:
        """See ``Plane``."""
        self.budget.forget(session)
        self._sessions.discard(session)
        if not self._sessions:
            self._all_left.set()

    def _accepted(self, *, unix: bool) -> Link:
        refusal = ""
        if self._draining:
            refusal = "the server stops"
        elif len(self._sessions) >= self._connections_max:
            refusal = f"{self._connections_max} connections are open, which is the limit"
        self.counters.accepted += not refusal
        self.counters.refused += bool(refusal)
        session = Session(self, refusal, unix=unix)
        self._sessions.add(session)
        return session.link

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(self._sessions)

    def look(self, sessions: Collection[Session]) -> None:
        """End connections that stall in a frame, never say who they are, or want nothing."""
        now_s = self.clock.now()
        for session in list(sessions):
            link = session.link
            silent_s = now_s - link.received_s
            if link.stalled(now_s) or (not session.welcomed and silent_s > WIRE_STALL_S_MAX):
                self.counters.stalled += 1
                link.abort()
            elif session.idle and silent_s > self._idle_s:
                session.refuse("nothing was asked for a long time")


def _bound_unix(path: str, mode: int) -> socket.socket:
    """Bind a Unix socket that nobody else could open for a moment. Raises ``OSError``."""
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o777 & ~mode)
    try:
        bound.bind(path)
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on; leave anything else, so that binding fails."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise OSError(errno.EEXIST, "there is a file of that name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise OSError(errno.EADDRINUSE, "somebody listens there")
