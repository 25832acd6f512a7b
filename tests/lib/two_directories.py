"""A cache over two directories of one folder: what is stored where, and what must hold."""

from __future__ import annotations

from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig, Durability
from kvtier.interfaces import Clock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import Tier
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    NAMESPACE,
    CacheSetup,
    settle,
    tier_stats,
    written,
)

NAMES = ("disk", "more")


def open_both(
    setup: CacheSetup,
    *,
    clock: Clock | None = None,
    dram_chunks: int = 16,
    disk_chunks: int = 32,
    both_are_well: bool = True,
) -> EngineDouble:
    """Open a cache over both directories, with an engine beside it; wait if they are well."""
    paths = [str(setup.folder / name) for name in NAMES]
    disk = DiskConfig(paths[0], disk_chunks * CHUNK_BYTES, Durability.NONE, more_paths=(paths[1],))
    config = CacheConfig(dram_bytes=dram_chunks * CHUNK_BYTES, disk=disk, slab_bytes=4096)
    cache = Cache(config, clock=clock, files=setup.files)
    engine = EngineDouble(cache, NAMESPACE, block_tokens=BLOCK, clock=clock)
    setup.engines.append(engine)
    if both_are_well:
        wait_until(lambda: not engine.cache.stats().degraded, "they do not open")
    return engine


def tokens_of(number: int) -> range:
    """One chunk's worth of tokens, of a sequence of its own."""
    return range(1000 * number, 1000 * number + CHUNK)


def store(engine: EngineDouble, *numbers: int) -> None:
    for number in numbers:
        engine.store(engine.sequence(tokens_of(number)))


def one_by_one(engine: EngineDouble, numbers: range) -> None:
    """Where they are to go is foreseen: while a directory is busy, chunks go to the other."""
    for number in numbers:
        store(engine, number)
        written(engine)


def on_disk_alone(
    setup: CacheSetup, count: int, clock: Clock | None = None, *, dram_chunks: int = 16
) -> EngineDouble:
    """Store chunks, restart, and wait until both directories are open."""
    engine = open_both(setup, dram_chunks=64)
    one_by_one(engine, range(count))
    setup.close(engine)
    return open_both(setup, clock=clock, dram_chunks=dram_chunks)


def files_of(setup: CacheSetup, name: str) -> list[Path]:
    return sorted((setup.folder / name / "shards").rglob("*.kvs"))


def lying_in(setup: CacheSetup, engine: EngineDouble, name: str, count: int) -> list[int]:
    """Which of the chunks lie in a directory."""
    there = {path.name[:64] for path in files_of(setup, name)}
    keys = [engine.sequence(tokens_of(number)).chunk_keys[0].hex() for number in range(count)]
    return [number for number, key in enumerate(keys) if key in there]


def loads(engine: EngineDouble, number: int) -> Tier | None:
    """Load a chunk, require right bytes, and tell from where it came; None for a miss."""
    match = engine.match(engine.sequence(tokens_of(number)))
    if not match.hits:
        return None
    return next(iter(engine.load(match).outcome.tokens_by_tier), None)


def disk_state(engine: EngineDouble) -> tuple[str, str]:
    stats = tier_stats(engine.cache, Tier.DISK)
    return stats.state, stats.detail


def check_each_shard_once(setup: CacheSetup, engine: EngineDouble) -> None:
    """The books and both directories agree, and no shard lies in two places."""

    def agree() -> bool:
        every = [path for name in NAMES for path in files_of(setup, name)]
        names = {path.name.partition("-")[0] for path in every}
        stats = tier_stats(engine.cache, Tier.DISK)
        return len(names) == len(every) == stats.chunks and stats.used_bytes == sum(
            path.stat().st_size for path in every
        )

    settle(engine)
    wait_until(agree, "the books and the directories differ")
