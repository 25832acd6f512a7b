"""KVTier: tiered, verified storage for the KV cache of LLM engines."""

from __future__ import annotations

from kvtier.cache.cache import Cache
from kvtier.cache.keyed import KeyedCache
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.config import CacheConfig, DiskConfig, Durability, RemoteConfig, WriteMode
from kvtier.errors import KVTierError
from kvtier.registry import connect
from kvtier.tiers.memory import ArenaHandle, map_arena
from kvtier.types import (
    Blocks,
    Features,
    GroupKind,
    KVGroup,
    KVLayout,
    LoadOutcome,
    Namespace,
    Placement,
    Plan,
    Result,
    Tier,
)

__version__ = "0.1.0"

__all__ = [
    "ArenaHandle",
    "Blocks",
    "Cache",
    "CacheConfig",
    "CacheWorker",
    "DiskConfig",
    "Durability",
    "Features",
    "GroupKind",
    "KVGroup",
    "KVLayout",
    "KVTierError",
    "KeyedCache",
    "Load",
    "LoadOutcome",
    "Namespace",
    "Pending",
    "Placement",
    "Plan",
    "Ready",
    "RemoteConfig",
    "Result",
    "Sequence",
    "Tier",
    "WriteMode",
    "connect",
    "map_arena",
]
