"""The cache behind a plug over a folder, on files that go wrong when a test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier.cache.cache import Cache
from kvtier.constants import MIB
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FaultyFiles
from kvtier.types import Tier
from kvtier_adapters.payloads.options import PlugOptions, plug_options
from kvtier_adapters.payloads.store import PlugStore
from tests.lib.cache_setup import idle, tier_stats


@dataclass
class PlugSetup:
    """Opens stores over one folder, one after the other."""

    folder: Path
    files: FaultyFiles = field(default_factory=FaultyFiles)

    @property
    def table(self) -> dict[str, Any]:
        """Options as a user writes them."""
        return {
            "dram": 32 * MIB,
            "disk": str(self.folder / "disk"),
            "disk_bytes": "64MiB",
            "weights_id": "weights 1",
        }

    @property
    def options(self) -> PlugOptions:
        return plug_options(self.table, "kvtier")

    def store(self, system: str, **changes: Any) -> PlugStore:
        """Open one whose disk is open."""
        options = replace(self.options, **changes)
        config = replace(options.cache_config(), slab_bytes=4096)
        cache = Cache(config, files=self.files)
        wait_until(lambda: tier_stats(cache, Tier.DISK).state != "opening", "no disk")
        return PlugStore(options, system, cache=cache)

    def shard_files(self) -> list[Path]:
        return sorted((self.folder / "disk" / "shards").rglob("*.kvs"))


def written(store: PlugStore) -> None:
    """Wait until all that was stored lies on disk."""
    wait_until(lambda: store.cache.stats().writes_queued == 0, "writes do not end")


@contextmanager
def plug_setup(folder: Path) -> Iterator[PlugSetup]:
    """Give a setup to a test; in the end, let everything go that it holds up."""
    setup = PlugSetup(folder)
    yield setup
    setup.files.inject()


def settled(store: PlugStore) -> None:
    """Wait until nothing is under way, then look through the books."""
    wait_until(lambda: idle(store.cache.stats()), f"not idle: {store.cache.stats()}")
    store.cache.check_integrity()
