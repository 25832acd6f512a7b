"""One connection and RESP2 on it, payload straight from and into the caller's memory. Blocks.

redis-py makes the connection: address, TLS, login, database. What follows is our own, because its
parser puts a value together before it hands it over: for 32 MiB that takes longer than the network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.constants import KIB, MIB
from kvtier_connectors.redis.errors import reply_error
from kvtier_connectors.redis.objects import HEADER_BYTES, INLINE_BYTES_MAX
from kvtier_connectors.redis.settings import Kind, Node, Settings

#: Payload and commands under way before the next reply is waited for. A server keeps the answers
#: to what was asked in memory, so this bounds what a reader costs it.
WINDOW_BYTES: Final = 8 * MIB
WINDOW_COMMANDS_MAX: Final = 512
#: No answer that is not read into a caller's buffer is larger.
ANSWER_BYTES_MAX: Final = HEADER_BYTES + INLINE_BYTES_MAX
_VALUE_BYTES_MAX: Final = 512 * MIB
_BUFFER_BYTES: Final = 16 * KIB
_LINE_BYTES_MAX: Final = 4 * KIB


@dataclass(frozen=True, slots=True)
class Command:
    """A command and where its answer goes.

    ``slot`` is the cluster's slot of its keys. Of a bulk answer the first ``head_bytes`` are
    returned and what follows goes ``into`` the caller's buffer as far as it reaches; without a
    buffer all of it is returned. When a command with the same ``job`` fails, the later ones are not
    sent any more, unless ``job`` is None. A redirection is no failure: the other keys of a slot
    that is on its way may still be here.
    """

    words: tuple[bytes | memoryview, ...]
    slot: int
    into: memoryview | None = None
    head_bytes: int = ANSWER_BYTES_MAX
    job: int | None = None

    @property
    def payload_bytes(self) -> int:
        """What it moves, either way."""
        sent = sum(len(word) for word in self.words if isinstance(word, memoryview))
        return sent + (len(self.into) if self.into is not None else 0)


@dataclass(frozen=True, slots=True)
class Bulk:
    """A value that came: its first bytes, and how long it was."""

    head: bytes
    nbytes: int


Reply = Bulk | int | bytes | None | Exception

ASKING: Final = Command((b"ASKING",), 0)


class _Tcp(Connection):
    """redis-py's connection, whose socket we may use once it has logged in."""

    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = super()._connect()
        return self.payload


class _Tls(SSLConnection):
    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = super()._connect()
        return self.payload


class _Unix(UnixDomainSocketConnection):
    payload: socket.socket

    def _connect(self) -> Any:
        self.payload = super()._connect()
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
        connection.connect()
        self._connection = connection
        self._socket = connection.payload
        self._socket.settimeout(settings.timeout_s)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
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
            full = waiting_bytes >= WINDOW_BYTES or len(waiting) >= WINDOW_COMMANDS_MAX
            # A command that is not sent is answered in its turn: after those that were.
            while waiting and (full or command.job in failed):
                waiting_bytes -= waiting[0].payload_bytes
                self._answer(waiting.popleft(), failed, answered)
                full = waiting_bytes >= WINDOW_BYTES
            if command.job in failed:
                answered(failed[command.job])
            else:
                self._send(command)
                waiting.append(command)
                waiting_bytes += command.payload_bytes
        while waiting:
            self._answer(waiting.popleft(), failed, answered)

    def abort(self) -> None:
        """Make whoever waits for this connection fail at once. From any thread."""
        # By another descriptor: TLS would take a shutdown of its own for plain text to come.
        with (
            self._lock,
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._socket.fileno())) as twin,
        ):
            twin.shutdown(socket.SHUT_RDWR)

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
        self._flush()
        reply = self._reply(command)
        sent_on = isinstance(reply, redis_errors.AskError)
        if isinstance(reply, Exception) and not sent_on and command.job is not None:
            failed[command.job] = reply
        answered(reply)

    def _send(self, command: Command) -> None:
        self._out += b"*%d\r\n" % len(command.words)
        for word in command.words:
            self._out += b"$%d\r\n" % len(word)
            if len(word) > _BUFFER_BYTES:
                self._flush()
                self._socket.sendall(word)
            else:
                self._out += word
            self._out += b"\r\n"
        if len(self._out) > _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            self._socket.sendall(self._out)
            self._out.clear()

    def _reply(self, command: Command) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return reply_error(rest.decode("utf-8", "replace"))
        try:
            number = int(rest)
        except ValueError:
            number = -2
        if kind == b":":
            return number
        if kind != b"$" or not -1 <= number <= _VALUE_BYTES_MAX:
            raise redis_errors.InvalidResponse(f"an answer that begins with {line[:20]!r}")
        return None if number == -1 else self._bulk(number, command)

    def _bulk(self, nbytes: int, command: Command) -> Bulk:
        head = bytearray(min(nbytes, command.head_bytes))
        self._fill(memoryview(head))
        rest = nbytes - len(head)
        if command.into is not None:
            placed = min(rest, len(command.into))
            self._fill(command.into[:placed])
            rest -= placed
        while rest:
            # More than was asked for: who asked sees it by the size.
            skipped = memoryview(bytearray(min(rest, _BUFFER_BYTES)))
            self._fill(skipped)
            rest -= len(skipped)
        if self._line() != b"":
            raise redis_errors.InvalidResponse("a value that does not end where it should")
        return Bulk(bytes(head), nbytes)

    def _line(self) -> bytes:
        while True:
            held = bytes(self._buffer[self._start : self._end])
            end = held.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return held[:end]
            if len(held) > _LINE_BYTES_MAX:
                raise redis_errors.InvalidResponse("a line without an end")
            self._buffer[: len(held)] = held
            self._start, self._end = 0, len(held)
            self._end += self._receive(self._buffer[self._end :])

    def _fill(self, into: memoryview) -> None:
        """Fill the memory: first with what has come already, then straight from the socket."""
        done = min(len(into), self._end - self._start)
        into[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(into):
            done += self._receive(into[done:])

    def _receive(self, into: memoryview) -> int:
        count = self._socket.recv_into(into)
        if count == 0:
            raise redis_errors.ConnectionError("the server closed the connection")
        return count
