"""The disk edge of a cache: the tier, its directories, and what goes there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.cache.below.disk_choices import DiskChoices
from kvtier.cache.below.opener import VolumeOpener
from kvtier.cache.below.writeout import Writeout
from kvtier.cache.executor import Executor
from kvtier.cache.shapes import Shapes
from kvtier.cache.state_log import DamageLog, StateLog
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.pins import KeptKeys
from kvtier.cache.tenancy.roots import Roots
from kvtier.config import DiskConfig
from kvtier.interfaces import Clock
from kvtier.obs.counters import Counters
from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, Tier


class DiskRoom:
    """Owns the disk tier and its write-out. Used under the cache's lock; it is not open yet."""

    def __init__(
        self,
        config: DiskConfig,
        choices: DiskChoices,
        files: FileSystem,
        dram: DramTier,
        executor: Executor,
        lock: threading.Lock,
        counters: Counters,
        clock: Clock,
        shapes: Shapes,
        epochs: Epochs,
        roots: Roots,
    ) -> None:
        share = config.capacity_bytes // len(config.paths)
        volumes = [
            Volume(number, ShardFiles(path, config.durability, files), share, clock)
            for number, path in enumerate(config.paths)
        ]
        self._counters = counters[Tier.DISK]
        self._clock = clock
        self._log, self._damage = StateLog(config.path), DamageLog(config.path)
        self.kept = KeptKeys(config.capacity_bytes, clock)
        self.tier = DiskTier(volumes, self.kept.guard(choices.policy), clock, self.left)
        work = (executor, lock, self._counters, clock, shapes)
        self.writeout = Writeout(
            dram, self.tier, *work, config.mode, choices.admission, choices.encoder
        )
        opener = partial(VolumeOpener, self.tier)
        self.openers: Sequence[VolumeOpener] = [
            opener(
                volume,
                executor,
                lock,
                self._counters,
                epochs,
                roots,
                clock,
                config.durability,
                self.writeout.pump,
            )
            for volume in volumes
        ]

    @property
    def opening(self) -> bool:
        """True while it is not known yet what lies there."""
        return not self.tier.opened and self.tier.state[0] == "opening"

    @property
    def last(self) -> list[Callable[[], None]]:
        """What each directory does at the very end."""
        return [opener.finish for opener in self.openers]

    def left(self, key: ChunkKey) -> None:
        """Note that the disk gave a chunk up."""
        self._counters.evicted_chunks += 1
        self.writeout.left_disk(key)

    def tick(self) -> str | None:
        """Start what is due; return what is to be logged."""
        for opener in self.openers:
            opener.tick()
        self.writeout.pump()
        now, volumes = self._clock.now(), self.tier.volumes
        count = sum(volume.put_away_count for volume in volumes)
        latest = max(volumes, key=lambda volume: volume.put_away_count).put_away_latest
        return self._log.line(*self.tier.state, now) or self._damage.line(count, latest, now)

    def close(self) -> None:
        """Let another process have the directories."""
        for opener in self.openers:
            opener.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self.writeout.check_integrity()
        self.tier.check_integrity()
