"""``mooncake://``: objects in a Mooncake Store, the pooled memory of several hosts.

::

    HEXKEY                header + data    an object of at most 64 KiB
    HEXKEY:GENERATION     data             a larger one, which the header under HEXKEY names

    header   magic "KVTM" · version 1 · 3 zero bytes · nbytes u64 · generation 16 ·
             xxh3 of what stands before and of the data behind u64         (big-endian, 40 bytes)

Mooncake writes over an object where it lies, so a reader beside a writer may see some of both. So
data lie under a name drawn for each write and are never written again, and what is written again
is small and has a checksum.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np
import xxhash

from kvtier.config import parse_size, url_options
from kvtier.constants import KIB, MIB
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
    MissingExtraError,
)
from kvtier.interfaces import ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.threads import Threads

PORT_DEFAULT: Final = 50_051
THREADS_MAX: Final = 64
CONNECT_S: Final = 2.0
INLINE_BYTES_MAX: Final = 64 * KIB
#: Who meets an object that is just being replaced tries so often.
TRIES_MAX: Final = 3
OPTIONS: Final = ("buffer", "device", "hostname", "metadata", "protocol", "segment", "threads")

_HEAD: Final = struct.Struct(">4sB3xQ16s")
_SUM: Final = struct.Struct(">Q")
_MAGIC: Final = b"KVTM"
_VERSION: Final = 1
_INLINE: Final = bytes(16)

#: What Mooncake's codes mean for a key. Any other is ``ConnectorUnavailableError``.
CODES: Final[dict[int, type[ConnectorError]]] = {
    -200: ConnectorRefusedError,  # No room in any segment.
    -600: ConnectorRefusedError,  # A size or name that it does not take.
}
_ABSENT: Final = frozenset({-703, -704})  # Not (or not yet) there.


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a URL says. ``segment_bytes`` of our memory go into the pool."""

    host: str
    port: int = PORT_DEFAULT
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 64 * MIB
    threads: int = 4


class _Header(NamedTuple):
    nbytes: int
    generation: bytes


class MooncakeConnector:
    """A ``Connector`` over a Mooncake Store (0.3), whose master evicts what was not read for long.

    For one event loop; Mooncake is waited for in threads of our own, and how long that takes is up
    to its own limits of time: up to some seconds when the master is gone. A cancelled call returns
    when its threads have. Buffers are registered with Mooncake while they are used.
    """

    def __init__(self, settings: Settings) -> None:
        """Load Mooncake, but do not connect yet. Raises ``MissingExtraError``."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            hint = 'pip install "kvtier[mooncake]" and the system\'s libibverbs'
            raise MissingExtraError(f"mooncake:// needs {hint}: {error}") from error
        self._new_client = MooncakeDistributedStore
        self._settings = settings
        self._threads = Threads(settings.threads, "kvtier-mooncake")
        self._lock = threading.Lock()
        self._made: Any = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``mooncake://master:50051?segment=1GiB``; the reference lists all options."""
        return cls(parse_url(url))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell whose header is there; a fault is no."""
        if not keys:
            return []
        names = [bytes(key).hex() or "-" for key in keys]
        (found,) = await self._each(lambda _, __: self._client().batch_is_exist(names), [None])
        return (
            [False for _ in keys] if isinstance(found, ConnectorError) else [n == 1 for n in found]
        )

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        pairs = list(zip(requests, into, strict=True))
        return await self._each(lambda pair, _: self._read(*pair), pairs)

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write the data of large objects, then the headers, then let go of what they replaced."""
        return await self._each(lambda item, _: self._write(item), items)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the headers; data that somebody reads go when the master wants the room."""
        await self._each(lambda key, _: self._delete(bytes(key).hex() or "-"), keys)

    async def close(self) -> None:
        """Leave the pool; what lies in our segment goes with it."""
        await self._each(lambda _, __: self._leave(), [None])
        self._threads.close()

    async def _each(self, function: Any, jobs: Sequence[Any]) -> list[Any]:
        return await self._threads.each(function, jobs, shares_max=self._settings.threads)

    def _client(self) -> Any:
        """Connect at first use. Raises ``ConnectorUnavailableError``; the next call tries again."""
        settings = self._settings
        with self._lock:
            if self._made is None:
                _look_for(settings.host, settings.port)
                client = self._new_client()
                code = client.setup(
                    settings.hostname,
                    settings.metadata,
                    settings.segment_bytes,
                    settings.buffer_bytes,
                    settings.protocol,
                    settings.device,
                    f"{settings.host}:{settings.port}",
                )
                if code:
                    raise ConnectorUnavailableError(f"Mooncake cannot be joined: code {code}")
                self._made = client
            return self._made

    def _leave(self) -> None:
        with self._lock:
            client, self._made = self._made, None
        if client is not None:
            client.close()

    def _read(self, request: ReadRequest, into: memoryview) -> int | None:
        name = bytes(request.key).hex() or "-"
        torn: ConnectorDataError | None = None
        for _ in range(TRIES_MAX):
            try:
                found, torn = self._header(name), None
            except ConnectorDataError as error:
                # Another one's, or one that is being written over just now.
                torn = error
                continue
            if found is None:
                return None
            header, inline = found
            count = max(0, min(request.nbytes, header.nbytes - request.offset))
            if header.generation == _INLINE:
                into[:count] = inline[request.offset : request.offset + count]
                return count
            data_name = _data_name(name, header.generation)
            if count == 0 or self._read_data(data_name, request.offset, into[:count]):
                return count
        if torn is not None:
            raise torn
        return None

    def _read_data(self, name: str, offset: int, into: memoryview) -> bool:
        """Read a range of what is never written again; False: it is not there any more."""
        with _registered(self._client(), into) as address:
            ranges = ([address], [[name]], [[[0]]], [[[offset]]], [[[len(into)]]])
            (((code,),),) = self._client().get_into_ranges(*ranges)
        if code in _ABSENT:
            return False
        if code != len(into):
            raise _failure(code)
        return True

    def _header(self, name: str) -> tuple[_Header, bytes] | None:
        """Return a header and the data behind it; None: no such object."""
        handle = self._client().get_buffer(name)
        if handle is None:
            code = self._client().is_exist(name)
            if code < 0 and code not in _ABSENT:
                raise _failure(code)
            return None
        return _decoded(bytes(memoryview(handle)))

    def _write(self, item: WriteItem) -> None:
        name, data = bytes(item.key).hex() or "-", item.data.cast("B")
        old = self._generation(name)
        generation, inline = _INLINE, bytes(data) if len(data) <= INLINE_BYTES_MAX else b""
        if not inline and len(data):
            generation = secrets.token_bytes(16)
            with _registered(self._client(), data) as address:
                code = self._client().put_from(_data_name(name, generation), address, len(data))
                _require(code)
        header = _encoded(_Header(len(data), generation), inline)
        code = self._client().upsert(name, header)
        for _ in range(TRIES_MAX - 1):
            if code in _ABSENT:  # Another writer of it has ended while we began.
                code = self._client().upsert(name, header)
        if code:
            self._remove(name, generation)
        _require(code)
        self._remove(name, old)

    def _delete(self, name: str) -> None:
        old = self._generation(name)
        self._client().remove(name, True)
        self._remove(name, old)

    def _generation(self, name: str) -> bytes:
        try:
            found = self._header(name)
        except ConnectorDataError:
            return _INLINE
        return found[0].generation if found else _INLINE

    def _remove(self, name: str, generation: bytes) -> None:
        """Let go of data; what is being read stays until the master wants the room."""
        if generation != _INLINE:
            self._client().remove(_data_name(name, generation))


def _look_for(host: str, port: int) -> None:
    """Raise ``ConnectorUnavailableError`` where nobody is: Mooncake would look for minutes."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        why = f"no Mooncake master: {error.strerror or error}"
        raise ConnectorUnavailableError(why) from error


def parse_url(url: str) -> Settings:
    """Return what the URL says. Raises ``ConfigError``."""
    options = url_options(url, OPTIONS)
    parts = urlsplit(url)
    if not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
        raise ConfigError("a mooncake:// URL is mooncake://master:50051")
    threads = options.get("threads", "4")
    if not threads.isdecimal() or not 1 <= int(threads) <= THREADS_MAX:
        raise ConfigError(f"threads is {threads!r}; allowed is 1 to {THREADS_MAX}")
    protocol = options.get("protocol", "tcp")
    if protocol not in {"tcp", "rdma"}:
        raise ConfigError(f"protocol is {protocol!r}; allowed: rdma, tcp")
    return Settings(
        host=parts.hostname,
        port=parts.port or PORT_DEFAULT,
        hostname=options.get("hostname", "127.0.0.1"),
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        protocol=protocol,
        device=options.get("device", ""),
        segment_bytes=_size(options, "segment", "0"),
        buffer_bytes=_size(options, "buffer", "64MiB"),
        threads=int(threads),
    )


def _size(options: Mapping[str, str], name: str, default: str) -> int:
    try:
        return parse_size(options.get(name, default))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


@contextmanager
def _registered(client: Any, memory: memoryview) -> Iterator[int]:
    """Let Mooncake reach memory as long as the context lasts; give its address."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _require(client.register_buffer(address, len(memory)))
    try:
        yield address
    finally:
        client.unregister_buffer(address)


def _encoded(header: _Header, inline: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, *header)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head + inline)) + inline


def _decoded(stored: bytes) -> tuple[_Header, bytes]:
    """Return a header and what lies behind it. Raises ``ConnectorDataError``."""
    inline = stored[_HEAD.size + _SUM.size :]
    if len(stored) >= _HEAD.size + _SUM.size:
        magic, version, nbytes, generation = _HEAD.unpack_from(stored)
        (checksum,) = _SUM.unpack_from(stored, _HEAD.size)
        known = magic == _MAGIC and version == _VERSION
        if known and checksum == xxhash.xxh3_64_intdigest(stored[: _HEAD.size] + inline):
            return _Header(nbytes, generation), inline
    raise ConnectorDataError("the object is not one that was written here")


def _data_name(name: str, generation: bytes) -> str:
    return f"{name}:{generation.hex()}"


def _require(code: int) -> None:
    if code:
        raise _failure(code)


def _failure(code: int) -> ConnectorError:
    return CODES.get(code, ConnectorUnavailableError)(f"Mooncake answered with code {code}")
