"""The books of the DRAM and the disk tier keep the contract of tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Durability
from kvtier.constants import ALIGN_BYTES
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.tier_contract import OnEvict, TierBooks, TierContract
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.dram import DramTier
from kvtier.tiers.index import Record
from kvtier.types import ShardId


class TestDramTier(TierContract):
    def make_tier(self, capacity_bytes: int, on_evict: OnEvict) -> TierBooks:
        arena = Arena(capacity_bytes, slab_bytes=ALIGN_BYTES)
        return DramTier(arena, LRU, FakeClock(), on_evict)

    def settle(self, tier: Any) -> None:
        """A slot is free at once."""

    def leave(self, tier: Any, record: Record[Any]) -> None:
        tier.abandon(record)


class TestDiskTier(TierContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.root = str(tmp_path)

    def make_tier(self, capacity_bytes: int, on_evict: OnEvict) -> TierBooks:
        files, clock = ShardFiles(self.root, Durability.NONE, LocalFiles()), FakeClock()
        volume = Volume(0, files, capacity_bytes, clock)
        tier = DiskTier([volume], LRU, clock, on_evict)
        found = files.open()
        tier.adopt(0, found, tier.cold_table(0, found))
        files.close()
        return tier

    def settle(self, tier: Any) -> None:
        for volume in tier.volumes:
            volume.finish_chores(volume.take_chores())

    def leave(self, tier: Any, record: Record[Any]) -> None:
        tier.forget(record)


class TestDiskTierWithQuarantine(TestDiskTier):
    """What fails verification stays on disk for a while, within the same bound."""

    keeps_what_left = True

    def leave(self, tier: Any, record: Record[Any]) -> None:
        tier.condemn(record, ShardId(0, 0, 0))
