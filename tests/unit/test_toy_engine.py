"""The toy engine takes nothing wrong from a tier, and says where its tokens came from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier.testing.toy_engine import ToyEngine


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(CacheConfig(dram_bytes=8 * MIB, slab_bytes=MIB))
    yield cache
    cache.close()


def test_a_longer_prompt_reuses_whole_chunks(cache: Cache) -> None:
    engine = ToyEngine(cache)
    assert engine.prefill(range(300)) == {"computed": 300}
    assert engine.prefill(range(700)) == {"dram": 256, "computed": 444}
    assert engine.prefill([*range(512), *range(88)]) == {"dram": 512, "computed": 88}
    engine.close()
    cache.check_integrity()


def test_tenants_share_nothing(cache: Cache) -> None:
    one, other = ToyEngine(cache), ToyEngine(cache, tenant="other")
    one.prefill(range(512))
    assert other.prefill(range(512)) == {"computed": 512}
    assert one.prefill(range(512)) == {"dram": 512, "computed": 0}
    one.close()
    other.close()


def test_a_wrong_byte_is_seen(cache: Cache) -> None:
    """Memory below is not summed, so a flipped bit in it reaches the pool, and the toy sees it."""
    engine = ToyEngine(cache)
    engine.prefill(range(256))
    for offset in range(0, len(cache.arena), 512):
        cache.arena[offset] ^= 1
    with pytest.raises(AssertionError, match="wrong values"):
        engine.prefill(range(256))
    engine.close()
