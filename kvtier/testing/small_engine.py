"""An engine double of a small made-up model with a cache of its own, for a first look."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig
from kvtier.registry import import_problem
from kvtier.testing.engine_double import EngineDouble
from kvtier.types import GroupKind, KVGroup, KVLayout, Namespace

_GROUP = KVGroup(GroupKind.FULL, layers=(0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
_NAMESPACE = Namespace("made-up weights", KVLayout((_GROUP,)))


@contextmanager
def small_engine(config: CacheConfig) -> Iterator[EngineDouble]:
    """Open a cache and an engine beside it, with a pool of 1,536 tokens; close both at the end.

    Always the same model, so what one start has left on disk is found by the next.
    Raises ``MissingExtraError`` without torch, and what ``Cache`` raises.
    """
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise import_problem(error, "the engine double") from error
    cache = Cache(config)
    try:
        engine = EngineDouble(cache, _NAMESPACE, block_tokens=16)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        cache.close()
