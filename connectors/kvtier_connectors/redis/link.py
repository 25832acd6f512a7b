"""One connection and RESP2 on it, payload straight from and into the caller's memory. Blocks.

redis-py makes the connection: address, TLS, login, database. What follows is our own, because its
parser puts a value together before it hands it over: for 32 MiB that takes longer than the network.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from kvtier.constants import KIB, MIB
from kvtier_connectors.redis.replies import BUFFER_BYTES, Command, Replies, Reply
from kvtier_connectors.redis.settings import Kind, Node, Settings
from kvtier_connectors.threads import Halt

#: Payload and commands under way before the next reply is waited for. A server keeps the answers
#: to what was asked in memory, so this bounds what a reader costs it.
WINDOW_BYTES: Final = 8 * MIB
WINDOW_COMMANDS_MAX: Final = 512
#: What is received in one call: it is still in the processor's caches when the call is made, and
#: the system lets more come in between two calls.
RECEIVE_BYTES: Final = 256 * KIB


_here: Final = threading.local()


@contextlib.contextmanager
def ended_by(halt: Halt) -> Iterator[None]:
    """Have connections that this thread makes meanwhile shut down when ``halt`` is set.

    A server that sends a byte now and then while they log in, or answers what redis-py asks, is
    never silent for long.
    """
    before, made = getattr(_here, "made", None), _Made(halt, [])
    _here.made = made
    try:
        yield
    finally:
        _here.made = before
        for action in made.actions:
            halt.forget(action)


class _Made(NamedTuple):
    halt: Halt
    actions: list[Callable[[], None]]


def _noted(made: socket.socket) -> socket.socket:
    """Return a socket that is connected, to be shut down as its thread has asked for."""
    here: _Made | None = getattr(_here, "made", None)
    if here is not None:
        action = partial(_shut_down, made)
        here.actions.append(action)
        here.halt.when_set(action)
    return made


def _shut_down(link: socket.socket) -> None:
    """Make whoever waits for a socket fail at once. From any thread."""
    # By another descriptor: TLS would take a shutdown of its own for plain text to come.
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(link.fileno())) as twin,
    ):
        twin.shutdown(socket.SHUT_RDWR)


class _Tcp(Connection):
    """redis-py's connection, whose socket we may use once it has logged in."""

    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = _noted(super()._connect())
        return self.payload


class _Tls(SSLConnection):
    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = _noted(super()._connect())
        return self.payload


class _Unix(UnixDomainSocketConnection):
    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = _noted(super()._connect())
        return self.payload


def connection_options(settings: Settings) -> dict[str, Any]:
    """Return what every connection of redis-py is made with."""
    options: dict[str, Any] = {
        "username": settings.login.username,
        "password": settings.login.password,
        # Until it has logged in, nobody could abort it; payload has a limit of its own.
        "socket_timeout": min(settings.timeout_s, settings.connect_timeout_s),
        "socket_connect_timeout": settings.connect_timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if settings.kind is not Kind.CLUSTER:
        options["db"] = settings.database
    if settings.tls:
        options |= {
            "ssl_ca_certs": settings.tls.ca,
            "ssl_certfile": settings.tls.cert,
            "ssl_keyfile": settings.tls.key,
            "ssl_check_hostname": settings.tls.check_hostname,
            "ssl_cert_reqs": "required",
        }
    return options


class _Pool(ConnectionPool):
    """redis-py puts pools into the text of errors, before 7.4 with their passwords."""

    def __repr__(self) -> str:
        options = self.connection_kwargs
        return str(options.get("path") or f"{options['host']}:{options['port']}")


def pool_of(settings: Settings, node: Node) -> ConnectionPool:
    """Return redis-py's pool of such connections."""
    options = connection_options(settings)
    if settings.kind is Kind.UNIX:
        return _Pool(_Unix, path=node.host, **options)
    kind = _Tls if settings.tls else _Tcp
    return _Pool(kind, host=node.host, port=node.port, **options)


@contextlib.contextmanager
def redis_expected() -> Iterator[None]:
    """Raise ``InvalidResponse`` for what redis-py, and we, make of answers that are not Redis's."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise redis_errors.InvalidResponse(f"no Redis answers: {error!r}") from error


class Link:
    """One connection that has logged in. One thread at a time, but for ``abort``."""

    def __init__(self, settings: Settings, node: Node) -> None:
        """Connect. Raises what redis-py raises, or ``OSError``."""
        options = connection_options(settings)
        connection: _Tcp | _Tls | _Unix
        if settings.kind is Kind.UNIX:
            connection = _Unix(path=node.host, **options)  # type: ignore[abstract]
        else:
            kind = _Tls if settings.tls else _Tcp
            connection = kind(host=node.host, port=node.port, **options)
        with redis_expected():
            connection.connect()
        self._connection = connection
        self._socket = connection.payload
        self._wait_flag = _limit_silence(self._socket, settings.timeout_s)
        self._replies = Replies(self._receive)
        self._out = bytearray()
        self._lock = threading.Lock()
        self.node = node

    def run(self, commands: Sequence[Command], answered: Callable[[Reply], None]) -> None:
        """Send the commands and hand over each answer, in their order.

        An error reply is an answer. Raises ``OSError`` and ``RedisError`` for a connection that is
        of no use any more; the commands that have no answer then may have been done or not.
        """
        waiting: deque[Command] = deque()
        failed: dict[int | None, Exception] = {}
        waiting_bytes = 0
        for command in commands:
            # A command that is not sent is answered in its turn: after those that were.
            while waiting and (
                waiting_bytes >= WINDOW_BYTES
                or len(waiting) >= WINDOW_COMMANDS_MAX
                or (failed and command.job in failed)
            ):
                waiting_bytes -= waiting[0].payload_bytes
                self._answer(waiting.popleft(), failed, answered)
            if failed and command.job in failed:
                answered(failed[command.job])
            else:
                self._send(command)
                waiting.append(command)
                waiting_bytes += command.payload_bytes
        while waiting:
            self._answer(waiting.popleft(), failed, answered)

    @property
    def quiet(self) -> bool:
        """True while nothing has come that no command has asked for, nor the end of the stream.

        Else the next command would get another one's answer.
        """
        watched = select.poll()
        watched.register(self._socket, select.POLLIN)
        return self._replies.empty and not watched.poll(0)

    def abort(self) -> None:
        """Make whoever waits for this connection fail at once. From any thread."""
        with self._lock:
            _shut_down(self._socket)

    def close(self) -> None:
        """Let go of the connection."""
        with self._lock:
            self._connection.disconnect()

    def _answer(
        self,
        command: Command,
        failed: dict[int | None, Exception],
        answered: Callable[[Reply], None],
    ) -> None:
        if self._out:
            self._flush()
        reply = self._replies.next(command)
        if isinstance(reply, Exception) and command.job is not None:
            sent_on = isinstance(reply, redis_errors.AskError)
            if not sent_on:
                failed[command.job] = reply
        answered(reply)

    def _send(self, command: Command) -> None:
        out = self._out
        out += b"*%d\r\n" % len(command.words)
        for word in command.words:
            if isinstance(word, bytes):
                out += b"$%d\r\n%b\r\n" % (len(word), word)
                continue
            out += b"$%d\r\n" % len(word)
            if len(word) > BUFFER_BYTES:
                self._flush()
                self._send_all(word)
            else:
                out += word
            out += b"\r\n"
        if len(out) > BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            self._send_all(self._out)
            self._out.clear()

    def _send_all(self, data: bytearray | bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError("the server takes nothing") from error

    def _receive(self, into: memoryview) -> int:
        nbytes = len(into)
        try:
            if nbytes <= BUFFER_BYTES:  # What comes ahead of a value is taken as it comes.
                return self._socket.recv_into(into)
            return self._socket.recv_into(into, min(nbytes, RECEIVE_BYTES), self._wait_flag)
        except BlockingIOError as error:
            raise TimeoutError("the server is silent") from error


def _limit_silence(link: socket.socket, timeout_s: float) -> int:
    """Have a socket wait so long for a byte; return the flag for a receive that fills its buffer.

    Python's own time-out asks the system whether a socket is ready, before each call and after each
    piece that fits into its buffer. The system's counts within a call, so silence after a first
    piece lasts up to twice as long. TLS needs Python's.
    """
    if isinstance(link, ssl.SSLSocket):
        link.settimeout(timeout_s)
        return 0
    link.settimeout(None)
    whole, part = divmod(timeout_s, 1)
    limit = struct.pack("ll", int(whole), max(1, int(part * 1e6)))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return socket.MSG_WAITALL
