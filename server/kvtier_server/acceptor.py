"""Lets connections in: many in each turn of the loop, and no more handshakes at once than allowed.

A loop's own server takes one connection in each of its turns. While clients keep those long,
whoever connects would wait for as many turns as there are others before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Final

from kvtier.constants import DAEMON_ACCEPTS_MAX, DAEMON_HANDSHAKES_MAX, WIRE_STALL_S_MAX
from kvtier.errors import ConfigError
from kvtier_server.refusals import handshake_fault, peer_name

_BACKLOG: Final = 4096
#: With no descriptor left there is nothing to do but to wait until somebody gives one back.
_FULL_PAUSE_S: Final = 0.1


class Acceptor:
    """One listening socket, which stays its owner's to close. Belongs to the loop's thread."""

    def __init__(
        self,
        listener: socket.socket,
        made: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        refused: Callable[[str, str], None],
    ) -> None:
        """Begin to listen. ``made`` is called for each connection once its handshake is done.

        ``refused`` is called with the host of whoever cannot shake hands, and why. Raises
        ``ConfigError`` where somebody else listens there.
        """
        self._listener, self._made, self._tls, self._refused = listener, made, tls, refused
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._closed = self._reading = False
        listener.setblocking(False)
        try:
            listener.listen(_BACKLOG)
        except OSError as error:  # Another process has bound it, too, and was first to listen.
            where = listener.getsockname()
            raise ConfigError(f"cannot listen at {where}: {error.strerror or error}") from error
        self._read()

    @property
    def entering(self) -> int:
        """Connections whose handshake is not done."""
        return len(self._entering)

    def close(self) -> None:
        """Let nobody in any more, but for those whose handshake goes on.

        A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._stop()
        if self._again is not None:
            self._again.cancel()
        # Whoever comes now is refused by the system; the path of a Unix socket stays its owner's.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    async def ended(self, seconds: float) -> None:
        """Wait for the handshakes that go on, so long at most; after ``close``."""
        if self._entering:
            await asyncio.wait(self._entering, timeout=seconds)

    def _read(self) -> None:
        if not self._reading and not self._closed:
            self._reading = True
            self._loop.add_reader(self._listener, self._accept)

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(DAEMON_ACCEPTS_MAX):
            if len(self._entering) >= DAEMON_HANDSHAKES_MAX:
                self._stop()
                return
            try:
                connection, address = self._listener.accept()
            except ConnectionError:  # It has gone away before its turn.
                continue
            except BlockingIOError:
                return
            except OSError:
                self._stop()
                self._again = self._loop.call_later(_FULL_PAUSE_S, self._read)
                return
            task = self._loop.create_task(self._enter(connection, address))
            self._entering.add(task)
            task.add_done_callback(self._entered)

    async def _enter(self, connection: socket.socket, address: object) -> None:
        seconds = WIRE_STALL_S_MAX if self._tls is not None else None
        # Whatever comes of it, the loop closes it: its descriptor is the transport's.
        try:
            await self._loop.connect_accepted_socket(
                self._made, connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except ssl.SSLError as error:
            self._refused(peer_name(address, None), handshake_fault(error))
        except OSError:
            return  # It has gone away, as who only looks whether somebody listens.

    def _entered(self, task: asyncio.Task[None]) -> None:
        self._entering.discard(task)
        if self._again is None or self._again.when() <= self._loop.time():
            self._read()
