"""What operators ask of a cache: bytes by namespace, eviction, pins and quotas while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.tenancy.held import Eviction, HeldPins
from kvtier.keys import tenant_digest
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK, CHUNK_BYTES, CacheSetup, begun, cache_setup, written

FIVE = range(5 * CHUNK)
BOTH = (Tier.DRAM, Tier.DISK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def found(engine: EngineDouble, tokens: range = FIVE) -> int:
    return engine.match(engine.sequence(tokens)).tokens // CHUNK


def stored(engine: EngineDouble) -> None:
    engine.store(engine.sequence(FIVE))
    written(engine)


def test_bytes_are_told_by_root_and_tier(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours")
    holdings = engine.cache.holdings
    assert holdings.by_root() == []
    stored(engine)
    (held,) = holdings.by_root()
    assert (held.dram_bytes, held.disk_bytes) == (5 * CHUNK_BYTES, 5 * CHUNK_BYTES)
    assert (held.tenant, held.epoch, held.current) == (tenant_digest("ours"), 0, True)
    assert held.root == engine.cache.root(engine.namespace)
    engine.cache.invalidate(engine.namespace)
    stored(engine)
    current = [each for each in holdings.by_root() if each.current]
    assert [(each.epoch, each.dram_bytes) for each in current] == [(1, 5 * CHUNK_BYTES)]


def test_keys_come_in_the_order_in_which_they_may_go(setup: CacheSetup) -> None:
    engine = setup.open()
    stored(engine)
    holdings, keys = engine.cache.holdings, engine.sequence(FIVE).chunk_keys
    assert holdings.keys(engine.namespace, Tier.DRAM, 9) == list(reversed(keys))
    assert holdings.keys(engine.namespace, Tier.DRAM, 2) == [keys[4], keys[3]]
    assert set(holdings.keys(engine.namespace, Tier.DISK, 9)) == set(keys)
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 5
    assert holdings is not engine.cache.holdings
    assert engine.cache.holdings.keys(engine.namespace, Tier.DRAM, 9) == []
    cold = engine.cache.holdings.keys(engine.namespace, Tier.DISK, 9)
    assert set(cold) == set(keys)
    assert len(engine.cache.holdings.keys(engine.namespace, Tier.DISK, 2)) == 2


def test_pins_are_told_by_root_and_time_left(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(salt="ours", clock=clock)
    holdings, keys = engine.cache.holdings, engine.sequence(FIVE).chunk_keys
    assert holdings.pins() == []
    stored(engine)
    holdings.pin(engine.namespace, keys[:3], 100.0)
    holdings.pin(engine.namespace, keys[3:4], 50.5)
    clock.advance(20.0)
    root, tenant = engine.cache.root(engine.namespace), tenant_digest("ours")
    one, three = CHUNK_BYTES, 3 * CHUNK_BYTES
    assert holdings.pins() == [
        HeldPins(root, tenant, 31, 1, one, one),
        HeldPins(root, tenant, 80, 3, three, three),
    ]
    holdings.unpin(keys[3:4])
    engine.cache.remove(keys[:1])
    two = 2 * CHUNK_BYTES
    assert holdings.pins() == [HeldPins(root, tenant, 80, 2, two, two)], "what is gone is no pin"
    engine.cache.invalidate(engine.namespace)
    assert holdings.pins() == [], "an epoch ends them"
    stored(engine)
    holdings.pin(engine.namespace, engine.sequence(FIVE).chunk_keys, 10.0)
    assert [row.chunks for row in holdings.pins()] == [5]
    clock.advance(10.0)
    assert holdings.pins() == []


def test_what_is_evicted_from_dram_is_on_disk_still(setup: CacheSetup) -> None:
    engine = setup.open()
    stored(engine)
    holdings, keys = engine.cache.holdings, list(reversed(engine.sequence(FIVE).chunk_keys))
    assert holdings.evict(keys, (Tier.DRAM,)) == [Eviction.EVICTED] * 5
    assert holdings.evict(keys, (Tier.DRAM,)) == [Eviction.ABSENT] * 5
    (held,) = holdings.by_root()
    assert (held.dram_bytes, held.disk_bytes) == (0, 5 * CHUNK_BYTES)
    assert found(engine) == 5
    assert holdings.evict(keys, BOTH) == [Eviction.EVICTED] * 5
    assert holdings.by_root() == []
    assert found(engine) == 0
    engine.cache.check_integrity()


def test_what_is_read_is_busy_and_stays_whole(setup: CacheSetup) -> None:
    engine = setup.open(disk_chunks=None)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE)
    keys = engine.sequence(FIVE).chunk_keys
    assert engine.cache.holdings.evict(keys, BOTH) == [Eviction.BUSY] * 5
    assert engine.drive(loading).end_token == 5 * CHUNK
    assert found(engine) == 5


def test_what_is_pinned_is_not_evicted_until_it_is_let_go(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=16)
    stored(engine)
    holdings, keys = engine.cache.holdings, list(engine.sequence(FIVE).chunk_keys)
    nowhere = list(engine.sequence(range(1000, 1000 + CHUNK)).chunk_keys)
    outcomes = holdings.pin(engine.namespace, [*keys[:2], *nowhere], 60.0)
    assert outcomes == [None, None, MissReason.ABSENT]
    assert holdings.pinned_bytes(engine.namespace) == 2 * 2 * CHUNK_BYTES, "in DRAM and on disk"
    evicted = holdings.evict(keys, BOTH)
    assert evicted == [Eviction.PINNED] * 2 + [Eviction.EVICTED] * 3
    assert holdings.unpin([*keys[:2], *nowhere]) == [True, True, False]
    assert holdings.pinned_bytes(engine.namespace) == 0
    assert holdings.evict(keys[:2], BOTH) == [Eviction.EVICTED] * 2


def test_quotas_change_while_it_runs(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours", disk_chunks=None)
    engine.store(engine.sequence(FIVE))
    assert engine.cache.tenants.nbytes("ours") == 5 * CHUNK_BYTES
    engine.cache.tenants.limit(0, {"ours": 2 * CHUNK_BYTES})
    assert engine.cache.tenants.nbytes("ours") == 5 * CHUNK_BYTES, "until it stores more"
    engine.store(engine.sequence(range(1000, 1000 + CHUNK)))
    assert engine.cache.tenants.nbytes("ours") == 2 * CHUNK_BYTES
    engine.cache.tenants.limit(3 * CHUNK_BYTES, {})
    engine.store(engine.sequence(range(2000, 2000 + 5 * CHUNK)))
    assert engine.cache.tenants.nbytes("ours") == 3 * CHUNK_BYTES
    engine.cache.tenants.limit(0, {})
    engine.store(engine.sequence(range(3000, 3000 + 5 * CHUNK)))
    assert engine.cache.tenants.nbytes("ours") == 8 * CHUNK_BYTES
