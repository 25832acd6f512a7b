"""Engines without DRAM on a real daemon: what they load lies in its memory, whatever befalls it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, RemoteConfig
from kvtier.constants import MIB
from kvtier.keys import shard_key
from kvtier.registry import connect
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.types import MissReason, Namespace, Placement, Plan, Tier, WriteItem
from tests.lib.cache_setup import BLOCK, CHUNK_BYTES, LAYOUT, settle, tier_stats, written
from tests.lib.daemon import Daemon, daemon
from tests.lib.remote_lab import remote_counters, tiers_of, tokens_of

FIVE = tokens_of(5)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(listen=(f"unix:{tmp_path}/socket",)) as made:
        yield made


@contextmanager
def engine_at(server: Daemon, *, load_deadline_s: float = 20.0) -> Iterator[EngineDouble]:
    """An engine without DRAM. In the end nothing of the server's is left in its memory."""
    config = CacheConfig(
        dram_bytes=0,
        remotes=(RemoteConfig(server.urls[0], deadline_s=5.0),),
        load_deadline_s=load_deadline_s,
        pending_deadline_s=20.0,
    )
    cache = Cache(config)
    engine = EngineDouble(cache, Namespace("weights", LAYOUT), block_tokens=BLOCK, block_count=128)
    yield engine
    settle(engine)
    wait_until(lambda: dram_bytes(engine) + cache.window.lent_bytes == 0, "something stays")
    engine.close()
    cache.close()


def dram_bytes(engine: EngineDouble) -> int:
    return tier_stats(engine.cache, Tier.DRAM).used_bytes


def stored(server: Daemon) -> None:
    """One engine computes five chunks, and ends."""
    with engine_at(server) as engine:
        assert engine.store(engine.sequence(FIVE))
        written(engine)


def pinned(server: Daemon) -> int:
    """Objects that the server holds for somebody."""
    tiers = server.get("/v1/stats")["tiers"]
    found: int = next(tier["pinned_chunks"] for tier in tiers if tier["name"] == "dram")
    return found


def poised(engine: EngineDouble) -> tuple[Loading, list[Plan]]:
    """A load of all five: all is lent and verified, nothing has been moved yet."""
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    plans: list[Plan] = []

    def ordered() -> bool:
        plans.extend(loading.load.poll())
        sections = sum(move.section_count for plan in plans for move in plan.moves)
        return sections == 5 * 3

    wait_until(ordered, "not all is ordered")
    assert dram_bytes(engine) == 0, "it was copied"
    return loading, plans


def carried(engine: EngineDouble, loading: Loading, plans: list[Plan]) -> Loading:
    """Have the plans carried out, and the load come to its end."""
    for plan in plans:
        engine.execute(plan)
    engine.drive(loading)
    engine.check(loading)
    return loading


def test_an_engine_without_dram_loads_what_another_stored_and_copies_nothing(
    server: Daemon,
) -> None:
    stored(server)
    with engine_at(server) as engine:
        match = engine.match(engine.sequence(FIVE))
        assert tiers_of(match) == [Tier.REMOTE] * 5
        assert engine.load(match).outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
        settle(engine)
        counters = remote_counters(engine)
        assert counters.lent_bytes == counters.read_bytes == 5 * CHUNK_BYTES
        figures = server.connections()
        assert figures["leases"] == 5
        assert figures["read_bytes"] == 0
        wait_until(lambda: pinned(server) == 0, "leases stay")
    assert server.stop() == 0


def test_what_is_lent_is_held_until_the_workers_have_answered(server: Daemon) -> None:
    stored(server)
    with engine_at(server) as engine:
        loading, plans = poised(engine)
        assert pinned(server) == 5
        assert carried(engine, loading, plans).outcome.end_token == len(FIVE)
        wait_until(lambda: pinned(server) == 0, "leases stay")
    assert server.stop() == 0


def test_b73_a_server_killed_while_its_memory_is_read_gives_no_token(server: Daemon) -> None:
    stored(server)
    with engine_at(server) as engine:
        loading, plans = poised(engine)
        server.stop(signal.SIGKILL)
        outcome = carried(engine, loading, plans).outcome
        assert outcome.end_token == 0
        assert {miss.reason for miss in outcome.misses} == {MissReason.UNAVAILABLE}


def test_a_server_that_is_frozen_keeps_what_it_has_lent(server: Daemon) -> None:
    stored(server)
    with engine_at(server) as engine:
        loading, plans = poised(engine)
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert carried(engine, loading, plans).outcome.end_token == len(FIVE)
        finally:
            server.process.send_signal(signal.SIGCONT)
    assert server.stop() == 0


def test_a_server_that_is_frozen_before_it_lends_is_a_miss_in_time(server: Daemon) -> None:
    stored(server)
    with engine_at(server, load_deadline_s=0.5) as engine:
        match = engine.match(engine.sequence(FIVE))
        server.process.send_signal(signal.SIGSTOP)
        try:
            loading = engine.begin_load(match)
            assert loading is not None
            assert engine.drive(loading).end_token == 0
            engine.check(loading)
        finally:
            server.process.send_signal(signal.SIGCONT)
        settle(engine)
    assert server.stop() == 0


async def test_what_is_replaced_while_it_is_lent_stays_what_it_was(server: Daemon) -> None:
    """Another client puts other bytes under all five keys, and fills the server beside."""
    stored(server)
    with engine_at(server) as engine:
        loading, plans = poised(engine)
        other = connect(server.urls[0])
        (shard,) = {move.shard for plan in plans for move in plan.moves}
        keys = [shard_key(hit.key, shard) for hit in loading.match.hits]
        junk = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))
        assert await other.write([WriteItem(key, junk) for key in keys]) == [None] * 5
        large = memoryview(bytes([7]) * (16 * MIB))
        for number in range(12):  # More than it holds.
            await other.write([WriteItem(b"large %d" % number, large)])
        await other.close()
        assert carried(engine, loading, plans).outcome.end_token == len(FIVE)
        again = engine.load(engine.match(engine.sequence(FIVE)))
        assert again.outcome.end_token == 0
    assert server.stop() == 0


def test_a_worker_in_another_process_would_have_it_copied(server: Daemon) -> None:
    """Where the arena is shared nothing is lent, because there the window means nothing."""
    stored(server)
    config = CacheConfig(
        dram_bytes=0,
        remotes=(RemoteConfig(server.urls[0]),),
        workers=(Placement(),),
        shared=True,
        pending_deadline_s=20.0,
    )
    cache = Cache(config)
    engine = EngineDouble(cache, Namespace("weights", LAYOUT), block_tokens=BLOCK, block_count=128)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    assert remote_counters(engine).lent_bytes == 0
    wait_until(lambda: dram_bytes(engine) == 0, "it stays")
    engine.close()
    cache.close()
    assert server.stop() == 0
