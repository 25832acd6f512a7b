"""Answers that end when the client does.

Plain handlers are not cancelled when a client hangs up; the work then runs on for nobody. Every
answer of this API therefore runs beside a watch on the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier_engine.api.errors import ApiError

T = TypeVar("T")

#: What the log says of a client that hung up; nobody receives it.
CLIENT_GONE = 499


class ClientGoneError(Exception):
    """The client closed its connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or cancel it and raise ``ClientGoneError`` if the client goes.

    The request's body must have been read. ``work`` has ended when this returns or raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of whole events, which is closed when the client goes.

    The status is sent with the first event: an ``ApiError`` before it is answered as any other,
    a later one as an event of its own, after which the stream ends without ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self._events = events
        self.status_code = HTTPStatus.OK
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; returns early, with the generator closed, if the client goes."""
        try:
            early = await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        if early is not None:
            await early.response()(scope, receive, send)

    async def _send_all(self, send: Send) -> ApiError | None:
        """Send everything, or return the error that came before anything was sent."""
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except ApiError as error:
                return error
            start = {"type": "http.response.start", "status": self.status_code}
            await send({**start, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                body = sse(compact_json(error.body()))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


def compact_json(value: Any) -> str:
    """Return a value as JSON in one line of ASCII, without spaces between its parts."""
    return json.dumps(value, separators=(",", ":"))


def sse(data: str) -> bytes:
    """Return one server-sent event; ``data`` holds no line break."""
    return f"data: {data}\n\n".encode()
