"""Ways to put shards into a store and to get them back: ours, plain clients, and the limits.

Each takes the shards of a round at once: ours as one batch, the others one after the other or by
threads, as their docstrings say. All read into memory that is warm.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import redis

from bench.lib.seaweed import BUCKET
from kvtier.constants import MIB
from kvtier.interfaces import Connector
from kvtier.types import ReadRequest, WriteItem

#: As large as the S3 connector's pieces, so that the loops differ in nothing else.
RANGE_BYTES = 8 * MIB


class Way(Protocol):
    """One way; the gate looks at what came."""

    def write(self, shards: Sequence[memoryview]) -> None: ...

    def read(self, into: Sequence[memoryview]) -> None: ...

    def clear(self, count: int) -> None:
        """Delete the shards of the last round: what a cache writes is new."""
        ...


class ByConnector:
    """Ours: a batch to write, a batch to read, in a loop of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connector: Connector) -> None:
        self._loop = loop
        self._connector = connector

    def write(self, shards: Sequence[memoryview]) -> None:
        items = [WriteItem(b"shard%d" % n, data) for n, data in enumerate(shards)]
        problems = self._loop.run_until_complete(self._connector.write(items))
        if any(problems):
            raise SystemExit(f"gate: a write failed: {problems}")

    def read(self, into: Sequence[memoryview]) -> None:
        requests = [ReadRequest(b"shard%d" % n, 0, len(each)) for n, each in enumerate(into)]
        outcomes = self._loop.run_until_complete(self._connector.read(requests, into))
        if outcomes != [len(each) for each in into]:
            raise SystemExit(f"gate: a read failed: {outcomes}")

    def clear(self, count: int) -> None:
        keys = [b"shard%d" % n for n in range(count)]
        self._loop.run_until_complete(self._connector.delete(keys))

    def close(self) -> None:
        self._loop.run_until_complete(self._connector.close())


class ByRawResp:
    """A loop over one socket, without a client: SET and GET of values of at most ``part_bytes``.

    The commands of a shard are sent ahead of their answers. It is what the protocol costs, and
    looks at nothing but lengths.
    """

    def __init__(self, target: tuple[str, int] | str, part_bytes: int) -> None:
        unix = isinstance(target, str)
        self._socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._socket.connect(target)
        if not unix:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._part_bytes = part_bytes
        self._names: list[bytes] = []

    def write(self, shards: Sequence[memoryview]) -> None:
        for number, data in enumerate(shards):
            parts = self._parts(number, data)
            self._names += [name for name, _ in parts]
            for name, part in parts:
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(part))
                self._socket.sendall(head)
                self._socket.sendall(part)
                self._socket.sendall(b"\r\n")
            for _ in parts:
                self._expect(b"+OK\r\n")

    def read(self, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into):
            parts = self._parts(number, target)
            gets = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name, _ in parts]
            self._socket.sendall(b"".join(gets))
            for _, part in parts:
                self._expect(b"$%d\r\n" % len(part))
                done = 0
                while done < len(part):
                    done += self._socket.recv_into(part[done:])
                self._expect(b"\r\n")

    def clear(self, count: int) -> None:
        del count
        for name in self._names:
            self._socket.sendall(b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%b\r\n" % (len(name), name))
            self._expect(b":1\r\n")
        self._names.clear()

    def close(self) -> None:
        self._socket.close()

    def _parts(self, number: int, data: memoryview) -> list[tuple[bytes, memoryview]]:
        size = self._part_bytes
        starts = range(0, len(data), size)
        return [(b"raw%d:%d:%d" % (size, number, s), data[s : s + size]) for s in starts]

    def _expect(self, answer: bytes) -> None:
        come = self._socket.recv(len(answer), socket.MSG_WAITALL)
        if come != answer:
            raise SystemExit(f"gate: the server answered {come!r}")


class ByRedisPy:
    """redis-py with hiredis: one value per shard, one call after the other."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def write(self, shards: Sequence[memoryview]) -> None:
        for number, data in enumerate(shards):
            self._client.set(b"redis-py%d" % number, data)

    def read(self, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into):
            found: Any = self._client.get(b"redis-py%d" % number)
            target[:] = found

    def clear(self, count: int) -> None:
        self._client.unlink(*(b"redis-py%d" % number for number in range(count)))

    def close(self) -> None:
        self._client.close()


class ByBoto3:
    """boto3's plain calls: one object per shard, one call after the other."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def write(self, shards: Sequence[memoryview]) -> None:
        for number, data in enumerate(shards):
            self._client.put_object(Bucket=BUCKET, Key=f"boto3/{number}", Body=bytes(data))

    def read(self, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into):
            target[:] = self._client.get_object(Bucket=BUCKET, Key=f"boto3/{number}")["Body"].read()

    def clear(self, count: int) -> None:
        for number in range(count):
            self._client.delete_object(Bucket=BUCKET, Key=f"boto3/{number}")


class ByBoto3Threads:
    """The best that a plain loop does: threads, each with an object to write or a range to read."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(8)

    def write(self, shards: Sequence[memoryview]) -> None:
        list(self._pool.map(self._write_one, range(len(shards)), shards))

    def read(self, into: Sequence[memoryview]) -> None:
        jobs = [
            (number, start, target[start : start + RANGE_BYTES])
            for number, target in enumerate(into)
            for start in range(0, len(target), RANGE_BYTES)
        ]
        list(self._pool.map(lambda job: self._read_range(*job), jobs))

    def clear(self, count: int) -> None:
        for number in range(count):
            self._client.delete_object(Bucket=BUCKET, Key=f"threads/{number}")

    def close(self) -> None:
        self._pool.shutdown()

    def _write_one(self, number: int, data: memoryview) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"threads/{number}", Body=bytes(data))

    def _read_range(self, number: int, start: int, into: memoryview) -> None:
        range_ = f"bytes={start}-{start + len(into) - 1}"
        body = self._client.get_object(Bucket=BUCKET, Key=f"threads/{number}", Range=range_)["Body"]
        done = 0
        while count := body.readinto(into[done : done + MIB]):
            done += count


class ByObstore:
    """obstore's own calls, whose loop is in Rust: whole objects, by threads of ours."""

    def __init__(self, endpoint: str, key: str, secret: str) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET,
            endpoint=endpoint,
            access_key_id=key,
            secret_access_key=secret,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        self._pool = ThreadPoolExecutor(8)

    def write(self, shards: Sequence[memoryview]) -> None:
        list(self._pool.map(self._write_one, range(len(shards)), shards))

    def read(self, into: Sequence[memoryview]) -> None:
        list(self._pool.map(self._read_one, range(len(into)), into))

    def clear(self, count: int) -> None:
        self._store.delete([f"obstore/{number}" for number in range(count)])

    def close(self) -> None:
        self._pool.shutdown()

    def _write_one(self, number: int, data: memoryview) -> None:
        self._store.put(f"obstore/{number}", data)

    def _read_one(self, number: int, into: memoryview) -> None:
        starts = list(range(0, len(into), RANGE_BYTES))
        ends = [min(start + RANGE_BYTES, len(into)) for start in starts]
        pieces = self._store.get_ranges(f"obstore/{number}", starts=starts, ends=ends)
        for start, piece in zip(starts, pieces, strict=True):
            into[start : start + len(piece)] = memoryview(piece)


class ByPlainFiles:
    """A copy in one call each way, without a rename and with nothing looked at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, shards: Sequence[memoryview]) -> None:
        for number, data in enumerate(shards):
            with (self._folder / str(number)).open("wb", buffering=0) as file:
                file.write(data)

    def read(self, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into):
            with (self._folder / str(number)).open("rb", buffering=0) as file:
                file.readinto(target)

    def clear(self, count: int) -> None:
        for number in range(count):
            (self._folder / str(number)).unlink(missing_ok=True)
