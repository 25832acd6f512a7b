"""HTTP for operators within bounds: uvicorn's protocol knows none for what it has not got whole.

A request's head is of bounded length, and so is what is sent of a body that nobody wants any more;
whoever stalls in either, or takes no answers, is cut off. Connections are counted, and so are the
requests that wait on one of them for their turn.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvtier.constants import (
    CONTROL_BODY_BYTES_MAX,
    CONTROL_CONNECTIONS_MAX,
    CONTROL_HEAD_BYTES_MAX,
    CONTROL_REQUESTS_MAX,
    CONTROL_STALL_S_MAX,
    LOG_INTERVAL_S,
)

#: A body comes in pieces, each with its size before it. Too long a one is answered long before.
_REQUEST_BYTES_MAX: Final = CONTROL_HEAD_BYTES_MAX + 2 * CONTROL_BODY_BYTES_MAX


class OnceAMinute(logging.Filter):
    """Lets each warning through once a minute: whoever sends rubbish would write the log."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is written. Errors are, all of them: they are bugs.

        Not so what is cut off as the server stops; uvicorn says how many requests those are.
        """
        if record.levelno >= logging.ERROR:
            cause = record.exc_info[1] if record.exc_info else None
            return not isinstance(cause, asyncio.CancelledError)
        text = str(record.msg)  # One of the few that uvicorn has.
        if record.created - self._told_s.get(text, 0.0) < LOG_INTERVAL_S:
            return False
        self._told_s[text] = record.created
        return True


_log = logging.getLogger("kvtier.http")
_log.addFilter(OnceAMinute())


class _Forgiving:
    """A transport that takes what is written too late, and leaves it.

    Of several requests that came in one go uvicorn tells the last one alone that its client is
    gone; the answer to another would be an error in the log, as often as anybody likes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Write, unless nobody is there."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Belongs to the loop's thread."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **named)
        self.logger = _log
        self._came_bytes = 0  # Of a request that is not here whole.
        self._in_head = True
        self._asked = False  # Anything yet.
        self._whole = 0  # Requests that came whole.
        self._before: tuple[int, int] | None = None
        self._look_later: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let nobody in beyond the bound."""
        super().connection_made(cast("asyncio.Transport", _Forgiving(transport)))
        if len(self.connections) > CONTROL_CONNECTIONS_MAX:
            transport.abort()
        else:
            self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """Look after it no more."""
        if self._look_later is not None:
            self._look_later.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take some bytes of a request, or of several; end what goes beyond the bounds."""
        if self.transport.is_closing():
            return
        self._came_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._came_bytes > CONTROL_HEAD_BYTES_MAX:
            if not self._asked or self.cycle.response_complete:
                self.send_400_response(f"allowed are {CONTROL_HEAD_BYTES_MAX} bytes of head")
            else:
                self.transport.abort()
        elif self._came_bytes > _REQUEST_BYTES_MAX:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """See ``HttpToolsProtocol``, which takes requests faster than it answers them."""
        if len(self.pipeline) >= CONTROL_REQUESTS_MAX:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests in one go")  # The parser stops at it.
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._in_head, self._asked = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._in_head, self._came_bytes = True, 0
        self._whole += 1
        super().on_message_complete()

    def _look_again(self) -> None:
        self._look_later = self.loop.call_later(CONTROL_STALL_S_MAX, self._look)

    def _look(self) -> None:
        """Cut it off where nothing has moved since the last time, though something should have."""
        unsent_bytes = self.transport.get_write_buffer_size()
        unread = self._came_bytes > 0 or not self._whole
        should_move = unread or unsent_bytes > 0 or self.transport.is_closing()
        now = (self._whole, unsent_bytes)
        if should_move and now == self._before:
            self.transport.abort()
            return
        self._before = now
        self._look_again()
