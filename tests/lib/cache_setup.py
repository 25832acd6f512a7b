"""Caches over one folder with doubles of an engine beside them, and what must hold at the end."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.cache.cache import Cache
from kvtier.cache.planner import chunk_shape
from kvtier.codecs.raw import RawCodec
from kvtier.config import CacheConfig, DiskConfig, Durability, TenantQuota, WriteMode
from kvtier.constants import HEALTH_BACKOFF_S_MIN
from kvtier.interfaces import Clock
from kvtier.obs.stats import CacheStats, TierStats
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.testing.fault_files import FaultyFiles
from kvtier.types import (
    ChunkKey,
    GroupKind,
    KVGroup,
    KVLayout,
    MissReason,
    Namespace,
    Placement,
    Plan,
    Result,
    Tier,
)

torch.set_num_threads(1)

CHUNK, BLOCK = 8, 4
FULL = KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, k_dim=8, v_dim=8, dtype="float32")
#: A chunk needs a page for its header and one for each of its three sections.
LAYOUT = KVLayout((FULL,), chunk_tokens=CHUNK, section_layers=1)
NAMESPACE = Namespace("weights", LAYOUT)
CHUNK_BYTES = 4 * 4096

WINDOWED = KVLayout(
    (
        KVGroup(GroupKind.FULL, (0, 3), kv_heads=2, k_dim=8, v_dim=8, dtype="float32"),
        KVGroup(
            GroupKind.WINDOW,
            (1, 2, 4),
            kv_heads=1,
            k_dim=16,
            v_dim=8,
            dtype="bfloat16",
            window_tokens=12,
        ),
    ),
    chunk_tokens=CHUNK,
    section_layers=1,
)
LATENT = KVLayout(
    (
        KVGroup(GroupKind.LATENT, (0, 1), kv_heads=1, k_dim=24, v_dim=0, dtype="bfloat16"),
        KVGroup(GroupKind.FULL, (2,), kv_heads=2, k_dim=8, v_dim=16, dtype="float16"),
    ),
    chunk_tokens=CHUNK,
    head_groups=2,
)
#: Four heads in two head groups: ranks of any degree that divides four can read it.
SPLIT = KVLayout(
    (KVGroup(GroupKind.FULL, (0, 1), kv_heads=4, k_dim=8, v_dim=8, dtype="float32"),),
    chunk_tokens=CHUNK,
    head_groups=2,
    section_layers=1,
)
STAGED = KVLayout((FULL,), chunk_tokens=CHUNK, stage_starts=(0, 2), section_layers=1)


def of_tenant(engine: EngineDouble, salt: str, adapter_id: str = "") -> EngineDouble:
    """Give another tenant an engine over the same cache; the caller closes it."""
    namespace = replace(engine.namespace, tenant_salt=salt, adapter_id=adapter_id)
    return EngineDouble(engine.cache, namespace, block_tokens=BLOCK)


def ranks(size: int, stages: int = 1) -> tuple[Placement, ...]:
    """Every rank of every stage."""
    return tuple(
        Placement(stage * size + rank, rank, size, stage)
        for stage in range(stages)
        for rank in range(size)
    )


def tier_stats(cache: Cache, tier: Tier) -> TierStats:
    """One tier's figures."""
    return next(each for each in cache.stats().tiers if each.tier is tier)


@dataclass
class CacheSetup:
    """Opens and closes caches over ``folder``. ``files`` are theirs, to let them go wrong.

    A test that expects errors to be logged clears ``errors`` before it ends.
    """

    folder: Path
    files: FaultyFiles = field(default_factory=FaultyFiles)
    byte_codec: str | None = None
    errors: list[logging.LogRecord] = field(default_factory=list)
    engines: list[EngineDouble] = field(default_factory=list)

    def open(
        self,
        layout: KVLayout = LAYOUT,
        *,
        dram_chunks: int = 16,
        dram_bytes: int | None = None,
        disk_chunks: int | None = 64,
        placements: tuple[Placement, ...] = ranks(1),
        mode: WriteMode = WriteMode.THROUGH,
        durability: Durability = Durability.NONE,
        clock: Clock | None = None,
        slab_bytes: int = 4096,
        salt: str = "",
        load_deadline_s: float = 5.0,
        pending_deadline_s: float = 2.0,
        block_count: int = 96,
        quota_chunks: int = 0,
        quotas: tuple[TenantQuota, ...] = (),
    ) -> EngineDouble:
        """Open a cache that holds so many chunks of ``layout``, with an engine beside it."""
        chunk_bytes = chunk_shape(layout, RawCodec()).chunk_bytes
        disk = None
        if disk_chunks is not None:
            capacity = disk_chunks * chunk_bytes
            where = str(self.folder / "disk")
            disk = DiskConfig(where, capacity, durability, mode, byte_codec=self.byte_codec)
        config = CacheConfig(
            dram_bytes=dram_chunks * chunk_bytes if dram_bytes is None else dram_bytes,
            disk=disk,
            slab_bytes=slab_bytes,
            workers=placements,
            load_deadline_s=load_deadline_s,
            pending_deadline_s=pending_deadline_s,
            tenant_quota_bytes=quota_chunks * chunk_bytes,
            tenant_quotas=quotas,
        )
        cache = Cache(config, clock=clock, files=self.files)
        namespace = Namespace("weights", layout, tenant_salt=salt)
        engine = EngineDouble(
            cache,
            namespace,
            placements=placements,
            block_tokens=BLOCK,
            block_count=block_count,
            clock=clock,
        )
        self.engines.append(engine)
        return engine

    def on_disk(self, tokens: range, layout: KVLayout = LAYOUT, **how: Any) -> EngineDouble:
        """Store a sequence, restart as ``how`` says, and wait: it lies on disk alone."""
        engine = self.open(layout, dram_chunks=64, placements=how.get("placements", ranks(1)))
        engine.store(engine.sequence(tokens))
        written(engine)
        self.close(engine)
        engine = self.open(layout, **how)
        assert engine.match(engine.sequence(tokens)).tokens == len(tokens)
        return engine

    def close(self, engine: EngineDouble, *, timeout_s: float = 10.0) -> None:
        """Wait for the disk, look that nothing is left over, and close."""
        settle(engine)
        self.engines.remove(engine)
        engine.close()
        engine.cache.close(timeout_s=timeout_s)

    def close_all(self) -> None:
        """Close what is open; every test ends with this. Raises where something was logged."""
        self.files.inject()
        for engine in list(self.engines):
            self.close(engine)
        messages = [record.getMessage() for record in self.errors]
        assert not messages, messages

    def lose_index(self) -> None:
        """Have the next open find out from the files alone what is there."""
        shutil.rmtree(self.folder / "disk" / "index")

    def shard_files(self) -> list[Path]:
        """Every shard on disk, in no order."""
        return sorted((self.folder / "disk" / "shards").rglob("*.kvs"))

    def disk_bytes(self) -> int:
        """Bytes of all shards on disk, whole, quarantined or being written."""
        total = 0
        for folder in ("shards", "quarantine", "incoming"):
            for path in (self.folder / "disk" / folder).rglob("*.kvs"):
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total


class ErrorLog(logging.Handler):
    """Collects what the cache logs as an error: a callback or storage work that broke."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.ERROR)
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def cache_setup(folder: Path) -> Iterator[CacheSetup]:
    """Give a setup to a test, and look in the end that nothing is left and nothing broke."""
    setup = CacheSetup(folder)
    log = ErrorLog(setup.errors)
    logging.getLogger("kvtier").addHandler(log)
    yield setup
    setup.close_all()
    logging.getLogger("kvtier").removeHandler(log)


def begun(engine: EngineDouble, tokens: range, *, deadline: float | None = None) -> Loading:
    """Begin to load a sequence of which something is held."""
    loading = engine.begin_load(engine.match(engine.sequence(tokens)), deadline=deadline)
    assert loading is not None
    return loading


def pins(engine: EngineDouble) -> tuple[int, int]:
    """Pinned chunks in DRAM and on disk."""
    return (
        tier_stats(engine.cache, Tier.DRAM).pinned_chunks,
        tier_stats(engine.cache, Tier.DISK).pinned_chunks,
    )


def fails(plan: Plan, worker: int = 0) -> Result:
    """A worker's answer that it could not do its moves."""
    return Result(plan.plan_id, worker, ok=False, reason=MissReason.WORKER, detail="on purpose")


def idle(stats: CacheStats) -> bool:
    """Tell whether nothing is under way and nothing is pinned."""
    moving = stats.loads_inflight + stats.stores_inflight + stats.late_jobs
    return not moving and not any(tier.pinned_chunks for tier in stats.tiers)


def settle(engine: EngineDouble) -> None:
    """Wait until nothing is under way, then look through the books."""
    wait_until(lambda: idle(engine.cache.stats()), f"not idle: {engine.cache.stats()}")
    engine.cache.check_integrity()


def written(engine: EngineDouble) -> None:
    """Wait until everything that was stored lies below, on disk or in remotes."""
    wait_until(lambda: engine.cache.stats().writes_queued == 0, "writes do not end")


def recovered(engine: EngineDouble, clock: FakeClock) -> bool:
    """Tell whether every tier is well, giving the breakers time to try again.

    Each call gives some, since what was under way may still fail and begin another back-off.
    """
    clock.advance(HEALTH_BACKOFF_S_MIN)
    return not engine.cache.stats().degraded


def store_one(engine: EngineDouble, start: int) -> ChunkKey:
    """Store a sequence of one chunk."""
    sequence = engine.sequence(range(start, start + CHUNK))
    assert engine.store(sequence)
    return sequence.chunk_keys[0]


def disk_chunks(engine: EngineDouble) -> int:
    return tier_stats(engine.cache, Tier.DISK).chunks


def refused(engine: EngineDouble, tier: Tier) -> dict[MissReason, int]:
    return dict(tier_stats(engine.cache, tier).counters.refused_chunks)
