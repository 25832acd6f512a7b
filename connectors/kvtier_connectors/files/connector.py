"""The connector behind ``file:///folder``: a folder, and threads that wait for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar
from urllib.parse import unquote, urlsplit

from aiofiles.os import wrap

from kvtier.config import url_options
from kvtier.errors import ConfigError, ConnectorError, nearest
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.files.folder import Folder, translated
from kvtier_connectors.threads import Halt, Threads, call_s_max

_Job = TypeVar("_Job")
_T = TypeVar("_T")

THREADS_DEFAULT: Final = 4
THREADS_MAX: Final = 64
#: How long a file server may take for a step; what hangs in the system itself nobody can end.
SILENCE_S: Final = 10.0
SYNCS: Final = ("none", "each")
DIRECTS: Final = ("no", "yes")


class FileConnector:
    """A ``Connector`` and ``Listable`` over a folder that exists already.

    Whole files and plain calls, nothing that a network file system does differently: no locks, no
    mapping, and no O_DIRECT but where it is asked for and works. An object is written under a name
    of its own, closed, and renamed over the old one, so a reader on any host sees one or the other.
    An NFS client sends what it has buffered when a file is closed, so all of it is there before the
    new name is (close-to-open, RFC 1813 section 4.11). Who may read the files is up to the
    process's umask.

    ``sync="each"`` flushes a file before its rename and the folder after it; with ``"none"`` the
    newest objects may be lost, or come back short, when a host dies. With ``direct`` the system's
    cache keeps nothing of what is read: it costs less of a processor, and is as fast the second
    time as the first.

    For one event loop; the file system is waited for in threads of our own. A cancelled call
    returns when its threads have let go of the buffers: after the step they are at, which a file
    server that hangs can hold up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync: str = "none",
        direct: str = "no",
        threads: int = THREADS_DEFAULT,
    ) -> None:
        """Does not look at the folder. Raises ``ConfigError`` for what is not allowed."""
        if not folder.is_absolute() or "\0" in str(folder):
            raise ConfigError(f"a folder is named from the root on; {str(folder)!r} is not")
        for name, given, allowed in (("sync", sync, SYNCS), ("direct", direct, DIRECTS)):
            if given not in allowed:
                hint, listed = nearest(given, allowed), ", ".join(allowed)
                raise ConfigError(f"{name} is {given!r}{hint}; allowed: {listed}")
        if not 1 <= threads <= THREADS_MAX:
            raise ConfigError(f"threads is {threads}; allowed is 1 to {THREADS_MAX}")
        self._folder = Folder(str(folder), sync=sync == "each", direct=direct == "yes")
        self._shares_max = threads
        self._threads = Threads(threads, "kvtier-file")

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``file:///folder?sync=none|each&direct=no|yes&threads=4``."""
        options = url_options(url, ("direct", "sync", "threads"))
        parts = urlsplit(url)
        if parts.netloc not in {"", "localhost"}:
            raise ConfigError("a file:// URL has three slashes: file:///folder")
        threads = options.get("threads", str(THREADS_DEFAULT))
        if not threads.isdecimal():
            raise ConfigError(f"threads is {threads!r}; it must be a number")
        sync, direct = options.get("sync", SYNCS[0]), options.get("direct", DIRECTS[0])
        folder = Path(unquote(parts.path))
        return cls(folder, sync=sync, direct=direct, threads=int(threads))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which files are there; a fault is no."""
        found = await self._share_out(lambda key, _: self._folder.contains(key), keys)
        return [outcome is True for outcome in found]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        pairs = list(zip(requests, into, strict=True))
        nbytes = sum(request.nbytes for request in requests)
        return await self._share_out(
            lambda pair, halt: self._folder.read(*pair, halt), pairs, nbytes
        )

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write each file anew and move it into its place."""
        nbytes = sum(item.data.nbytes for item in items)
        return await self._share_out(self._folder.write, items, nbytes)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the files; what cannot be removed stays."""
        await self._share_out(lambda key, _: self._folder.delete(key), keys)

    async def close(self) -> None:
        """Take no more calls; those that run are finished."""
        self._threads.close()

    async def _listed(self, function: Callable[[], Sequence[_T]]) -> Sequence[_T]:
        (found,) = await self._share_out(lambda call, _: call(), [function])
        if isinstance(found, ConnectorError):
            raise found
        return found

    async def _share_out(
        self, function: Callable[[_Job, Halt], _T], jobs: Sequence[_Job], nbytes: int = 0
    ) -> list[_T | ConnectorError]:
        """Do the jobs in at most ``threads`` threads; return the outcomes in their order.

        What takes much longer than so many bytes may is given up after the step it is at.
        """
        guarded = partial(_guarded, function)
        limit_s = call_s_max(SILENCE_S, nbytes)
        return await self._threads.each(
            guarded, jobs, shares_max=self._shares_max, hop=wrap, limit_s=limit_s
        )

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """Walk through the folder, a part at a time.

        Raises ``ConnectorError`` where a part cannot be read. An object that comes or goes
        meanwhile may or may not be told.
        """
        for name in await self._listed(self._folder.folders):
            for info in await self._listed(partial(self._folder.objects, name, prefix)):
                yield info


def _guarded(function: Callable[[_Job, Halt], _T], job: _Job, halt: Halt) -> _T:
    try:
        return function(job, halt)
    except OSError as error:
        raise translated(error) from error
