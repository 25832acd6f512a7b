"""Keyed caches over one folder, and payloads that say whose they are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.cache.keyed import KeyedCache
from kvtier.cache.keyed_desk import Outcome
from kvtier.cache.keyed_transfer import Transfer
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.constants import MIB
from kvtier.interfaces import Clock
from kvtier.registry import connect as connect_url
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FaultyFiles
from kvtier.types import GroupKind, KVGroup, KVLayout, Namespace, Tier
from tests.lib.cache_setup import ErrorLog, idle, tier_stats
from tests.lib.remote_lab import ToyRemote

LAYOUT = KVLayout((KVGroup(GroupKind.FULL, (0,), 1, k_dim=8, v_dim=8, dtype="float32"),))
NAMESPACE = Namespace("weights", LAYOUT)
SCHEME = "test 1"
POISON = 0xA5


def payload(key: bytes, nbytes: int, version: int = 0) -> bytes:
    """Return bytes that no other key, size or version has."""
    seed = hashlib.sha256(b"%s %d %d" % (key, nbytes, version)).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


@dataclass
class KeyedSetup:
    """Opens and closes caches over ``folder``, each with one keyed face; ``files`` go wrong."""

    folder: Path
    files: FaultyFiles = field(default_factory=FaultyFiles)
    remote: ToyRemote | None = None
    errors: list[logging.LogRecord] = field(default_factory=list)
    faces: list[tuple[KeyedCache, Cache]] = field(default_factory=list)

    def open(
        self,
        *,
        dram_bytes: int = 16 * MIB,
        disk_bytes: int | None = 64 * MIB,
        clock: Clock | None = None,
        codec: str = "raw",
        disk_codec: str | None = None,
        byte_codec: str | None = None,
        await_disk: bool = True,
    ) -> tuple[KeyedCache, Cache]:
        """Open a cache and a face of it, and wait until its disk is open."""
        path = str(self.folder / "disk")
        how = {"codec": disk_codec, "byte_codec": byte_codec}
        disk = DiskConfig(path, disk_bytes, **how) if disk_bytes else None  # type: ignore[arg-type]
        remote = self.remote
        config = CacheConfig(
            dram_bytes,
            disk,
            slab_bytes=4096,
            codec=codec,
            remotes=() if remote is None else (RemoteConfig("toy://"),),
        )
        connect = connect_url if remote is None else lambda _: remote
        cache = Cache(config, clock=clock, files=self.files, connect=connect)
        keyed = KeyedCache(cache, NAMESPACE, SCHEME, clock=clock)
        self.faces.append((keyed, cache))
        if disk is not None and await_disk:
            wait_until(lambda: tier_stats(cache, Tier.DISK).state != "opening", "no disk")
        return keyed, cache

    def close(self, keyed: KeyedCache) -> None:
        """Close a face and its cache; nothing is left over."""
        ((face, cache),) = (pair for pair in self.faces if pair[0] is keyed)
        self.faces.remove((face, cache))
        keyed.close()
        settle(cache)
        cache.close()

    def in_remote(self, sizes: dict[bytes, int]) -> tuple[KeyedCache, Cache]:
        """Store payloads and restart: they lie in the remote alone."""
        self.remote = self.remote or ToyRemote()
        keyed, cache = self.open(dram_bytes=64 * MIB, disk_bytes=None)
        assert put(keyed, sizes) == [Tier.DRAM] * len(sizes)
        written(cache)
        self.close(keyed)
        return self.open(disk_bytes=None)

    def on_disk(self, sizes: dict[bytes, int], **how: int) -> tuple[KeyedCache, Cache]:
        """Store payloads and restart: they lie on disk alone."""
        keyed, cache = self.open(dram_bytes=64 * MIB)
        assert put(keyed, sizes) == [Tier.DRAM] * len(sizes)
        written(cache)
        self.close(keyed)
        return self.open(**how)  # type: ignore[arg-type]

    def shard_files(self) -> list[Path]:
        return sorted((self.folder / "disk" / "shards").rglob("*.kvs"))


@contextmanager
def keyed_setup(folder: Path) -> Iterator[KeyedSetup]:
    """Give a setup to a test, and look in the end that nothing is left and nothing broke."""
    setup = KeyedSetup(folder)
    log = ErrorLog(setup.errors)
    logging.getLogger("kvtier").addHandler(log)
    yield setup
    setup.files.inject()
    if setup.remote is not None:
        setup.remote.twist.clear()
        setup.remote.release()
    for keyed, _ in list(setup.faces):
        setup.close(keyed)
    logging.getLogger("kvtier").removeHandler(log)
    messages = [record.getMessage() for record in setup.errors]
    assert not messages, messages


def settle(cache: Cache) -> None:
    """Wait until nothing is under way, then look through the books."""
    wait_until(lambda: idle(cache.stats()), f"not idle: {cache.stats()}")
    cache.check_integrity()


def written(cache: Cache) -> None:
    """Wait until everything that was stored lies on disk."""
    wait_until(lambda: cache.stats().writes_queued == 0, "writes do not end")


def finished(transfer: Transfer) -> list[Outcome]:
    """Wait for a transfer of a cache whose clock stands still."""
    wait_until(lambda: transfer.poll() is not None, "a transfer does not end")
    outcomes = transfer.poll()
    assert outcomes is not None
    return outcomes


def put(keyed: KeyedCache, sizes: dict[bytes, int], version: int = 0) -> list[Outcome]:
    """Store a payload per key."""
    items = [(key, payload(key, nbytes, version)) for key, nbytes in sizes.items()]
    return finished(keyed.put(items))


def get(
    keyed: KeyedCache,
    sizes: dict[bytes, int],
    version: int | Callable[[bytes], int] = 0,
) -> list[Outcome]:
    """Read payloads; what is said to be there has to be right."""
    into = [bytearray([POISON]) * nbytes for nbytes in sizes.values()]
    outcomes = finished(keyed.get(list(sizes), into))
    for (key, nbytes), data, outcome in zip(sizes.items(), into, outcomes, strict=True):
        if isinstance(outcome, Tier):
            said = version(key) if callable(version) else version
            assert data == payload(key, nbytes, said), f"{key!r}: wrong bytes from {outcome}"
    return outcomes
