"""Tenants: what they hold, counted exactly, and their end, at once and for good."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvtier.config import TenantQuota
from kvtier.constants import GIVE_WAY_TENANTS_MAX
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import tenant_digest
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, Miss, MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    begun,
    cache_setup,
    of_tenant,
    refused,
    settle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)
Others = Callable[..., EngineDouble]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def other(setup: CacheSetup) -> Iterator[Others]:
    """Other tenants' engines; they are closed before the cache."""
    with ExitStack() as undo:

        def made(engine: EngineDouble, salt: str, adapter_id: str = "") -> EngineDouble:
            double = of_tenant(engine, salt, adapter_id)
            undo.callback(double.close)
            return double

        yield made
    del setup


def found(engine: EngineDouble, tokens: range = FIVE) -> int:
    return engine.match(engine.sequence(tokens)).tokens


def stored(engine: EngineDouble, tokens: range = FIVE) -> None:
    engine.store(engine.sequence(tokens))
    written(engine)


def nothing_waits(engine: EngineDouble) -> None:
    wait_until(lambda: not engine.cache.tenants.reclaimable_bytes, "nothing is given back")


# The end of a tenant


def test_a_deleted_tenant_is_gone_at_once_with_all_of_its_namespaces(
    setup: CacheSetup, other: Others
) -> None:
    ours = setup.open(salt="ours")
    adapted = other(ours, "ours", adapter_id="an adapter")
    theirs = other(ours, "theirs")
    for engine in (ours, adapted, theirs):
        stored(engine)
    before = ours.sequence(FIVE)
    match = ours.match(before)
    assert ours.cache.tenants.delete("ours") == 1
    assert [found(engine) for engine in (ours, adapted, theirs)] == [0, 0, 40]
    assert ours.begin_load(match) is None
    assert not ours.store(before), "what began before is not stored any more"
    stored(ours)
    assert found(ours) == 40, "and it begins anew"


def test_what_a_deleted_tenant_held_is_given_back(setup: CacheSetup, other: Others) -> None:
    ours = setup.open(salt="ours")
    theirs = other(ours, "theirs")
    for engine in (ours, theirs):
        stored(engine)
    ours.cache.tenants.delete("ours")
    nothing_waits(ours)

    def held() -> list[int]:
        return [tier_stats(ours.cache, tier).used_bytes for tier in (Tier.DRAM, Tier.DISK)]

    wait_until(lambda: held() == [5 * CHUNK_BYTES] * 2, "files are not unlinked")
    assert len(setup.shard_files()) == 5
    assert found(theirs) == 40


def test_a_deleted_tenant_stays_away_after_a_kill_and_its_bytes_are_given_back_later(
    setup: CacheSetup, other: Others
) -> None:
    ours = setup.open(salt="ours")
    theirs = other(ours, "theirs")
    for engine in (ours, theirs):
        stored(engine)
    disk = setup.folder / "disk"
    wait_until((disk / "roots").exists, "it is not kept whose chunks they are")
    copy = setup.folder / "killed" / "disk"
    shutil.copytree(disk, copy)
    ours.cache.tenants.delete("ours")
    shutil.copy(disk / "epochs", copy / "epochs")  # As if killed when the call returned.
    killed = CacheSetup(setup.folder / "killed")
    again = killed.open(salt="ours")
    assert found(again) == 0
    strangers = other(again, "theirs")
    assert found(strangers) == 40
    nothing_waits(again)
    wait_until(lambda: len(killed.shard_files()) == 5, "files are not unlinked")
    strangers.close()
    killed.close_all()


def test_an_invalidated_namespace_is_given_back_too(setup: CacheSetup) -> None:
    engine = setup.open()
    stored(engine)
    engine.cache.invalidate(engine.namespace)
    nothing_waits(engine)
    wait_until(lambda: not setup.shard_files(), "files are not unlinked")
    assert tier_stats(engine.cache, Tier.DRAM).used_bytes == 0


def test_what_is_being_loaded_is_given_back_when_the_load_has_ended(setup: CacheSetup) -> None:
    engine = setup.on_disk(FIVE, salt="")
    loading = begun(engine, FIVE)
    for plan in loading.load.poll():
        engine.execute(plan)
    engine.cache.invalidate(engine.namespace)
    assert engine.drive(loading).misses == (Miss(Tier.DISK, MissReason.ABSENT, 40),)
    nothing_waits(engine)
    settle(engine)


def test_a_tenant_without_a_salt_is_none() -> None:
    with pytest.raises(ConfigError, match="no tenant's"):
        tenant_digest("")


def test_an_end_that_could_not_be_written_holds_and_is_written_later(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours")
    stored(engine)
    obstacle = setup.folder / "disk" / "epochs.new"
    obstacle.mkdir()
    with pytest.raises(TierUnavailableError, match="kept in memory"):
        engine.cache.tenants.delete("ours")
    assert found(engine) == 0
    obstacle.rmdir()
    wait_until((setup.folder / "disk" / "epochs").exists, "it is not written later")
    setup.close(engine)
    engine = setup.open(salt="ours")
    assert found(engine) == 0


# What a tenant holds


def test_a_tenant_is_told_what_it_holds_also_after_a_restart(
    setup: CacheSetup, other: Others
) -> None:
    ours = setup.open(salt="ours")
    theirs = other(ours, "theirs")
    stored(ours)
    stored(theirs, range(2 * CHUNK))
    tenants = ours.cache.tenants
    assert tenants.nbytes("ours") == 10 * CHUNK_BYTES, "five in DRAM, five on disk"
    assert tenants.nbytes("theirs") == 4 * CHUNK_BYTES
    assert tenants.nbytes("nobody") == 0
    theirs.close()
    setup.close(ours)
    tenants = setup.open(salt="").cache.tenants
    wait_until(lambda: tenants.nbytes("ours") == 5 * CHUNK_BYTES, "it is not known any more")
    assert tenants.nbytes("theirs") == 2 * CHUNK_BYTES, "though neither has come back"


@pytest.mark.parametrize("damage", [b"", b"x" * 100, bytes(200)])
def test_a_damaged_file_of_roots_costs_accounts_and_nothing_else(
    setup: CacheSetup, damage: bytes
) -> None:
    engine = setup.open(salt="ours")
    stored(engine)
    setup.close(engine)
    (setup.folder / "disk" / "roots").write_bytes(damage)
    engine = setup.open(salt="")
    engine.match(engine.sequence([]))
    assert engine.cache.tenants.nbytes("ours") == 0
    setup.close(engine)
    engine = setup.open(salt="ours")
    assert found(engine) == 40
    assert engine.cache.tenants.nbytes("ours") == 5 * CHUNK_BYTES, "known again once it is used"


# Quotas


def test_a_tenant_above_its_quota_gives_way_to_itself_alone(
    setup: CacheSetup, other: Others
) -> None:
    ours = setup.open(salt="ours", disk_chunks=None, quota_chunks=4)
    theirs = other(ours, "theirs")
    theirs.store(theirs.sequence(range(4 * CHUNK)))
    for start in range(0, 40 * CHUNK, 4 * CHUNK):
        assert ours.store(ours.sequence(range(start, start + 4 * CHUNK)))
        assert ours.cache.tenants.nbytes("ours") == 4 * CHUNK_BYTES
        assert found(ours, range(start, start + 4 * CHUNK)) == 32, "the newest is there"
    assert found(theirs, range(4 * CHUNK)) == 32
    assert refused(ours, Tier.DRAM) == {}


def test_what_gives_way_is_put_in_order_once_for_many_stores(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = setup.open(salt="ours", disk_chunks=None, quota_chunks=8)
    coldest, orders = DramTier.coldest, mock.Mock()

    def counted(tier: DramTier, namespaces: Collection[bytes]) -> list[ChunkKey]:
        orders()
        return coldest(tier, namespaces)

    monkeypatch.setattr(DramTier, "coldest", counted)
    for start in range(0, 1000 * 24, 1000):
        assert engine.store(engine.sequence(range(start, start + CHUNK)))
    assert refused(engine, Tier.DRAM) == {}
    assert orders.call_count <= 3, "looked at all that the tenant holds for each store"


def test_what_gives_way_is_kept_in_order_for_so_many_tenants(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most users of a server come once: what they held then must not be remembered for ever."""
    engine = setup.open(disk_chunks=None, dram_chunks=8 * GIVE_WAY_TENANTS_MAX, quota_chunks=3)
    coldest, orders = DramTier.coldest, mock.Mock()
    starts = itertools.count(0, 1000)

    def counted(tier: DramTier, namespaces: Collection[bytes]) -> list[ChunkKey]:
        orders()
        return coldest(tier, namespaces)

    def ordered(tenant: int, *, chunks: int) -> int:
        """Store so many chunks; return how often what the tenant holds was put in order."""
        engine.namespace = replace(engine.namespace, tenant_salt=f"tenant {tenant}")
        before = orders.call_count
        for start in itertools.islice(starts, chunks):
            assert engine.store(engine.sequence(range(start, start + CHUNK)))
        return int(orders.call_count - before)

    monkeypatch.setattr(DramTier, "coldest", counted)
    for tenant in range(GIVE_WAY_TENANTS_MAX):
        assert ordered(tenant, chunks=4) == 1
    assert ordered(0, chunks=1) == 0
    for tenant in range(1, GIVE_WAY_TENANTS_MAX + 1):
        ordered(1000 + tenant, chunks=4)
    assert ordered(0, chunks=1) == 1


def test_a_sequence_longer_than_the_quota_is_stored_as_far_as_it_goes(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours", disk_chunks=None, quota_chunks=3)
    sequence = engine.sequence(FIVE)
    assert engine.store(sequence)
    assert found(engine) == 3 * CHUNK, "its own first chunks do not give way to the later ones"
    assert sequence.refused is MissReason.QUOTA
    assert refused(engine, Tier.DRAM) == {MissReason.QUOTA: 1}


def test_on_disk_too_a_tenant_gives_way_to_itself_alone(setup: CacheSetup, other: Others) -> None:
    ours = setup.open(salt="ours", quota_chunks=8)
    theirs = other(ours, "theirs")
    stored(theirs, range(4 * CHUNK))
    for start in range(0, 30 * CHUNK, 2 * CHUNK):
        stored(ours, range(start, start + 2 * CHUNK))
        assert ours.cache.tenants.nbytes("ours") <= 8 * CHUNK_BYTES
    assert found(ours, range(start, start + 2 * CHUNK)) == 2 * CHUNK, "the newest is there"
    assert found(theirs, range(4 * CHUNK)) == 4 * CHUNK
    on_disk = len(setup.shard_files())
    assert 4 + 6 <= on_disk <= 4 + 8, "copies in DRAM give way before what is on disk"


def test_after_a_restart_what_was_there_before_gives_way(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours")
    stored(engine, range(8 * CHUNK))
    setup.close(engine)
    engine = setup.open(salt="ours", quota_chunks=8)
    wait_until(lambda: engine.cache.tenants.nbytes("ours") == 8 * CHUNK_BYTES, "not known")
    new = range(1000, 1000 + 2 * CHUNK)
    stored(engine, new)
    assert found(engine, new) == 2 * CHUNK
    assert engine.cache.tenants.nbytes("ours") <= 8 * CHUNK_BYTES
    kept = found(engine, range(8 * CHUNK))
    assert kept >= 4 * CHUNK, "no more than was needed, the deepest first"


def test_one_tenant_may_have_a_quota_of_its_own(setup: CacheSetup, other: Others) -> None:
    special = TenantQuota(tenant_digest("special").hex(), 2 * CHUNK_BYTES)
    free = TenantQuota(tenant_digest("free").hex(), 0)
    first = setup.open(salt="usual", disk_chunks=None, quota_chunks=4, quotas=(special, free))
    held = []
    for engine in (first, other(first, "special"), other(first, "free"), other(first, "")):
        engine.store(engine.sequence(FIVE))
        held.append(found(engine) // CHUNK)
    assert held == [4, 2, 5, 5]


def test_loads_are_never_refused_for_a_quota(setup: CacheSetup) -> None:
    engine = setup.open(salt="ours")
    stored(engine)
    setup.close(engine)
    engine = setup.open(salt="ours", quota_chunks=5)
    outcome = engine.load(engine.match(engine.sequence(FIVE))).outcome
    assert outcome.tokens_by_tier == {Tier.DISK: 40}
    settle(engine)
    stored(engine, range(1000, 1000 + CHUNK))
    assert engine.cache.tenants.nbytes("ours") <= 5 * CHUNK_BYTES


@pytest.mark.parametrize("tenant", ["", "abc", "A" * 64, "g" * 64, "0" * 63, "0" * 65])
def test_a_quota_names_its_tenant_by_a_digest(tenant: str) -> None:
    with pytest.raises(ConfigError, match=r"tenant_quotas\.tenant"):
        TenantQuota(tenant, 1)
