"""A connector in a package of its own: objects in a toy server, behind ``toy://host:port``.

A request is a line of JSON, and so is its answer; the bytes of an object follow the line. Each call
has a connection of its own, so nothing that comes late is taken for the answer to something else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from kvtier.config import url_options
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import ReadOutcome
from kvtier.types import ReadRequest, WriteItem

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ToyConnector:
    """A ``Connector`` to one toy server. Belongs to one event loop."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 5.0) -> None:
        """Connect to nobody yet. ``timeout_s`` bounds each call."""
        self._host, self._port = host, port
        self._timeout_s = timeout_s
        self._closed = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Read ``toy://host:port?timeout_s=5``. Raises ``ConfigError``."""
        parts = urlsplit(url)
        options = url_options(url, ("timeout_s",))
        try:
            timeout_s, port = float(options.get("timeout_s", "5")), parts.port
        except ValueError as error:
            raise ConfigError(f"toy://: {error}") from error
        if parts.hostname is None or port is None or parts.path not in {"", "/"}:
            raise ConfigError("toy:// needs a host and a port, and no path")
        return cls(parts.hostname, port, timeout_s=timeout_s)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Connector``."""

        async def ask(streams: Streams, key: bytes) -> bool:
            return _count(await _ask(streams, {"do": "size", "key": key.hex()})) is not None

        return [found is True for found in await self._each(keys, ask)]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """See ``Connector``."""

        async def ask(streams: Streams, asked: tuple[ReadRequest, memoryview]) -> int | None:
            request, buffer = asked
            range_ = {"offset": request.offset, "nbytes": request.nbytes}
            count = _count(await _ask(streams, {"do": "read", "key": request.key.hex(), **range_}))
            if count is not None and count > request.nbytes:
                raise ConnectorDataError("more bytes than were asked for")
            placed = 0
            while count is not None and placed < count:
                piece = await streams[0].read(count - placed)
                if not piece:
                    raise ConnectionError("it ends in the middle of an object")
                buffer[placed : placed + len(piece)] = piece
                placed += len(piece)
            return count

        return await self._each(list(zip(requests, into, strict=True)), ask)

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """See ``Connector``."""

        async def ask(streams: Streams, item: WriteItem) -> None:
            line = {"do": "write", "key": item.key.hex(), "nbytes": len(item.data)}
            await _ask(streams, line, item.data)

        return await self._each(items, ask)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """See ``Connector``."""

        async def ask(streams: Streams, key: bytes) -> None:
            await _ask(streams, {"do": "delete", "key": key.hex()})

        await self._each(keys, ask)

    async def close(self) -> None:
        """See ``Connector``."""
        self._closed = True

    async def _each(
        self, keys: Sequence[Key], ask: Callable[[Streams, Key], Awaitable[Outcome]]
    ) -> list[Outcome | ConnectorError]:
        """Ask for one key after the other; what breaks the connection is the rest's outcome."""
        found: list[Outcome | ConnectorError] = []
        if self._closed:
            return [ConnectorUnavailableError("it is closed")] * len(keys)
        if not keys:
            return found
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                for key in keys:
                    try:
                        found.append(await ask((reader, writer), key))
                    except ConnectorRefusedError as error:
                        found.append(error)
        # The most specific first: a time limit is an ``OSError``, too.
        except TimeoutError:
            fault: ConnectorError = ConnectorTimeoutError("no answer in time")
        except OSError as error:
            fault = ConnectorUnavailableError(str(error))
        except ConnectorError as error:
            fault = error
        else:
            return found
        finally:
            if writer is not None:
                writer.transport.abort()
        return [*found, *([fault] * (len(keys) - len(found)))]


async def _ask(streams: Streams, line: dict[str, Any], payload: bytes | memoryview = b"") -> Any:
    """Send a request; return what the line of its answer says."""
    reader, writer = streams
    writer.write(json.dumps(line).encode() + b"\n")
    writer.write(payload)
    await writer.drain()
    try:
        answer = json.loads(await reader.readuntil(b"\n"))
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise ConnectorDataError("an answer that is no JSON") from error
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("it hung up") from error
    if isinstance(answer, dict) and answer.get("refused"):
        raise ConnectorRefusedError("the server refuses it")
    return answer


def _count(answer: Any) -> int | None:
    """Return how many bytes an answer says; None for no object."""
    count = answer.get("nbytes") if isinstance(answer, dict) else -1
    if count is None or (isinstance(count, int) and count >= 0):
        return count
    raise ConnectorDataError("an answer that says no size")
