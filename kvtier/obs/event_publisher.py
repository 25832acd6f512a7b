"""Publishing KV events over ZeroMQ, as vLLM's publisher does.

A message has three parts: the topic (empty), its number as eight big-endian bytes, and the batch.
Numbers count up from 0, so a reader that was too slow for its connection sees the gap.

Whoever subscribes is told everything that is held, after an ``AllBlocksCleared`` for all: also a
reader that comes late, that lost a message, or whose server was started anew. For that the socket
is an XPUB one, which hears of subscriptions; to readers it is what a PUB socket is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT, EVENTS_TAKEN_MAX
from kvtier.errors import ConfigError, MissingExtraError
from kvtier.interfaces import Clock
from kvtier.obs.events import Event, encode_batch

_log = logging.getLogger(__name__)

#: How long an event waits for others at most, and how often everything is told anew at most.
_EVERY_MS: Final = 20
_ANEW_S: Final = 1.0
#: Messages that a slow reader's connection keeps, before it misses some.
_MESSAGES_QUEUED_MAX: Final = 4096
_SUBSCRIBED: Final = b"\x01"


class EventSource(Protocol):
    """What gives events, as the feed of a cache."""

    def take(self, count_max: int) -> list[Event]:
        """Return what is to be told next; empty when there is nothing."""
        ...

    def begin_anew(self) -> None:
        """Tell everything once more."""
        ...


class EventPublisher:
    """Owns a socket and the thread that takes events and sends them."""

    def __init__(
        self,
        endpoint: str,
        *,
        clock: Clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Bind ``endpoint``, such as ``tcp://127.0.0.1:5557`` or ``ipc:///run/kvtier/events``.

        Raises ``ConfigError`` where it cannot be bound, ``MissingExtraError`` without pyzmq.
        """
        try:
            import zmq
        except ImportError as error:
            raise MissingExtraError('KV events need pyzmq: pip install "kvtier[events]"') from error
        self._clock = clock
        self._wall = wall
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_QUEUED_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events at {endpoint}: {error.strerror}") from error
        #: Where it listens; the port that was taken where 0 was asked for.
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._number = 0
        self._anew_at = clock.now()
        self._anew_due = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, source: EventSource) -> None:
        """Begin to publish what ``source`` gives, on a thread of its own; once."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(
            target=self._run_boundary, args=(source,), name="kvtier-events", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_DEADLINE_S_DEFAULT) -> None:
        """Send what is to be told, and end. A second call does nothing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self._context.destroy(linger=0)

    def _run_boundary(self, source: EventSource) -> None:
        """Be the thread. What arrives here is a bug: events end, requests go on."""
        try:
            while not self._closed.is_set():
                self._hear(source, _EVERY_MS)
                self._send(source)
            self._send(source)
        # Requests go on, without events.
        except Exception:
            _log.exception("KV events have ended")
        # Readers get what was sent, within a second.
        self._context.destroy(linger=1000)

    def _hear(self, source: EventSource, timeout_ms: int) -> None:
        """Wait for a subscription or for time to pass; tell everything anew, not too often."""
        while self._socket.poll(timeout_ms):
            message: Any = self._socket.recv()
            self._anew_due |= message[:1] == _SUBSCRIBED
            timeout_ms = 0
        now = self._clock.now()
        if self._anew_due and now >= self._anew_at:
            self._anew_due = False
            self._anew_at = now + _ANEW_S
            source.begin_anew()

    def _send(self, source: EventSource) -> None:
        """Send all that is to be told, a message for some events each."""
        while events := source.take(EVENTS_TAKEN_MAX):
            number = self._number.to_bytes(8, "big")
            self._socket.send_multipart((b"", number, encode_batch(events, self._wall())))
            self._number += 1
