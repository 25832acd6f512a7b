"""A connector of your own, whole: objects in an SQLite file, behind ``sqlite:///folder/file.db``.

Five methods, one table of errors, nothing of tiers. A package makes it known by an entry point:

    [project.entry-points."kvtier.connectors"]
    sqlite = "own_connector:SqliteConnector"

and proves it by the kit in two lines, with `ListableContract` beside it if it can list:

    class TestSqliteConnector(ConnectorContract, ListableContract):
        def make_connector(self): return connect(f"sqlite://{tempfile.mkdtemp()}/kv.db")
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar
from urllib.parse import unquote, urlsplit

from kvtier.config import url_options
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem

T = TypeVar("T")

#: The outcome for an error of the driver. The most specific class counts.
ERRORS: Final[dict[type[sqlite3.Error], type[ConnectorError]]] = {
    sqlite3.DataError: ConnectorRefusedError,
    sqlite3.OperationalError: ConnectorUnavailableError,
    sqlite3.ProgrammingError: ConnectorUnavailableError,
    sqlite3.DatabaseError: ConnectorDataError,
}
_TABLE: Final = "CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, data BLOB NOT NULL)"


class SqliteConnector:
    """A ``Connector`` and ``Listable`` over one file. Belongs to one event loop.

    SQLite blocks, so it runs in a thread of ours, which never sees the caller's buffers: a call
    that is cancelled has let go of them.
    """

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        """Open nothing yet."""
        self._path = path
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._database: sqlite3.Connection | None = None
        self._closed = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sqlite:///folder/file.db?timeout_s=5``. An unknown option is an error."""
        options = url_options(url, ("timeout_s",))
        parts = urlsplit(url)
        if parts.netloc or not parts.path:
            raise ConfigError("an sqlite:// URL has three slashes: sqlite:///folder/file.db")
        try:
            timeout_s = float(options.get("timeout_s", "5"))
        except ValueError as error:
            raise ConfigError(
                f"timeout_s is {options['timeout_s']!r}, which is no number"
            ) from error
        return cls(unquote(parts.path), timeout_s=timeout_s)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which keys have a row; a fault is no."""
        return [await self._contains(bytes(key)) for key in keys]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        pairs = zip(requests, into, strict=True)
        return [await self._read(request, buffer) for request, buffer in pairs]

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Replace rows, each in a transaction of its own."""
        return [await self._write(bytes(item.key), bytes(item.data)) for item in items]

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the rows that are there."""
        rows = [(bytes(key),) for key in keys]
        await self._do(lambda db: db.executemany("DELETE FROM objects WHERE key = ?", rows))

    async def close(self) -> None:
        """Close the file."""
        if not self._closed:
            await self._do(lambda db: db.close())
            self._closed = True
            self._thread.shutdown()

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """Tell all rows as they are now. Raises ``ConnectorError``."""
        query = "SELECT key, length(data) FROM objects"
        rows = await self._do(lambda db: db.execute(query).fetchall())
        if isinstance(rows, ConnectorError):
            raise rows
        for key, nbytes in rows:
            if key.startswith(prefix):
                yield KeyInfo(key, nbytes)

    async def _contains(self, key: bytes) -> bool:
        query = "SELECT 1 FROM objects WHERE key = ?"
        row = await self._do(lambda db: db.execute(query, (key,)).fetchone())
        return row is not None and not isinstance(row, ConnectorError)

    async def _write(self, key: bytes, data: bytes) -> ConnectorError | None:
        query = "INSERT OR REPLACE INTO objects VALUES (?, ?)"
        done = await self._do(lambda db: db.execute(query, (key, data)))
        return done if isinstance(done, ConnectorError) else None

    async def _read(self, request: ReadRequest, into: memoryview) -> ReadOutcome:
        query = "SELECT substr(data, ?, ?) FROM objects WHERE key = ?"
        values = request.offset + 1, request.nbytes, bytes(request.key)
        row = await self._do(lambda db: db.execute(query, values).fetchone())
        if row is None or isinstance(row, ConnectorError):
            return row
        part = row[0] or b""  # Nothing of a blob is a text.
        into[: len(part)] = part
        return len(part)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T | ConnectorError:
        """Do something with the open file in our thread; its fault is what it returns."""
        if self._closed:
            return ConnectorUnavailableError("the connector is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)

    def _done(self, work: Callable[[sqlite3.Connection], T]) -> T | ConnectorError:
        try:
            if self._database is None:
                database = sqlite3.connect(self._path, timeout=self._timeout_s)
                database.execute(_TABLE)
                self._database = database
            with self._database:
                return work(self._database)
        except sqlite3.Error as error:
            return _translated(error)


def _translated(error: sqlite3.Error) -> ConnectorError:
    kinds = [ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS]
    outcome = (kinds or [ConnectorUnavailableError])[0](str(error))
    outcome.__cause__ = error
    return outcome
