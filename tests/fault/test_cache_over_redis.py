"""A cache over real Redis servers that move slots, fail over, die, forget and come back.

Whatever they do, what is loaded is right, the rest is a miss, and hits come back with the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.registry import connect
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import GroupKind, KVGroup, KVLayout, Tier
from tests.lib.cache_setup import CHUNK, tier_stats, written
from tests.lib.redis_cluster import (
    SLOTS,
    RedisCluster,
    call,
    redis_cluster,
    redis_with_sentinel,
)
from tests.lib.redis_servers import RedisServer, redis_server
from tests.lib.remote_lab import RemoteLab, remote_lab, tokens_of

#: Chunks of 1.5 MiB: a header and two parts each.
LARGE = KVLayout(
    (KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=8, k_dim=1024, v_dim=1024, dtype="float32"),),
    chunk_tokens=CHUNK,
    section_layers=1,
)
SEQUENCES = [tokens_of(3, start=1000 * number) for number in range(4)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def over(lab: RemoteLab, url: str) -> EngineDouble:
    """Open a cache with a large layout over a store."""
    lab.wrap = lambda _: connect(url)
    return lab.open(
        LARGE,
        dram_chunks=1024,
        block_count=24,
        load_deadline_s=60.0,
        pending_deadline_s=20.0,
    )


def filled(lab: RemoteLab, url: str) -> EngineDouble:
    """Store the sequences and restart: they lie in the store alone."""
    engine = over(lab, url)
    for tokens in SEQUENCES:
        engine.store(engine.sequence(tokens))
        written(engine)
    assert state(engine) == "ok"
    lab.close(engine)
    return over(lab, url)


def state(engine: EngineDouble) -> str:
    return tier_stats(engine.cache, Tier.REMOTE).state


def loaded(engine: EngineDouble, tokens: range) -> int:
    """Load what is found, look at every byte of it, and return how many tokens that were."""
    match = engine.match(engine.sequence(tokens))
    if not match.tokens:
        return 0
    return engine.load(match).outcome.end_token


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do something in a thread until it, or the block, ends; its failure is ours."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work, stop)
        try:
            yield
        finally:
            stop.set()
        working.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def used_slots(cluster: RedisCluster) -> list[int]:
    """The slots of what lies in the cluster."""
    names = [name for server in cluster.servers for name in call(server, "KEYS", "*")]
    slots = {call(cluster.servers[0], "CLUSTER", "KEYSLOT", name) for name in names}
    return sorted(slots)


def test_slots_that_move_while_it_loads_cost_nothing(lab: RemoteLab, cluster: RedisCluster) -> None:
    """MOVED and ASK, before, within and after an object's parts."""
    engine = filled(lab, cluster.url)
    slots = used_slots(cluster)
    assert len(slots) >= 3 * len(SEQUENCES)
    moved = 0

    def move(stop: threading.Event) -> None:
        nonlocal moved
        while not stop.is_set():
            slot = slots[moved % len(slots)]
            source = cluster.owner(slot)
            target = (source + 1) % len(cluster.servers)
            for name in cluster.begin_move(slot, source, target):
                cluster.move_keys([name], source, target)
            cluster.end_move(slot, target)
            moved += 1

    with meanwhile(move):
        for turn in range(3):
            for tokens in SEQUENCES:
                assert loaded(engine, tokens) == len(tokens), f"turn {turn}: {engine.cache.stats()}"
            lab.close(engine)
            engine = over(lab, cluster.url)
    assert moved > 3
    assert state(engine) == "ok"


def store_all(engine: EngineDouble) -> None:
    for tokens in SEQUENCES:
        engine.store(engine.sequence(tokens))
    written(engine)


def hits_come_back(lab: RemoteLab, engine: EngineDouble, url: str) -> None:
    """Compute what is missed and store it, until everything is found again after a restart.

    Chunk by chunk: what lies behind a miss is believed to be there until somebody asks for it.
    """

    def back() -> bool:
        store_all(engine)
        return state(engine) == "ok"

    whole = [len(tokens) for tokens in SEQUENCES]
    for _ in range(max(whole) // CHUNK):
        wait_until(back, f"not used again: {state(engine)}")
        lab.close(engine)
        engine = over(lab, url)
        if [loaded(engine, tokens) for tokens in SEQUENCES] == whole:
            return
    raise AssertionError("hits do not come back")


def test_a_node_that_dies_costs_its_own_chunks_and_comes_back(
    lab: RemoteLab, tmp_path: Path
) -> None:
    (tmp_path / "nodes").mkdir()
    with redis_cluster(tmp_path / "nodes") as cluster:
        engine = filled(lab, cluster.url)
        cluster.servers[0].kill()
        counts = [loaded(engine, tokens) for tokens in SEQUENCES]
        assert sum(counts) < sum(map(len, SEQUENCES))
        cluster.servers[0].start()
        wait_until(lambda: cluster_is_well(cluster), "the cluster does not come together")
        hits_come_back(lab, engine, cluster.url)
        lab.close_all()


def cluster_is_well(cluster: RedisCluster) -> bool:
    return all(
        call(server, "CLUSTER", "INFO")["cluster_slots_ok"] == str(SLOTS)
        for server in cluster.servers
    )


def test_a_failover_below_a_cache_costs_misses_at_most(lab: RemoteLab, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    with redis_with_sentinel(tmp_path / "nodes") as watched:
        engine = filled(lab, watched.url)
        watched.wait_for_replica()
        assert loaded(engine, SEQUENCES[0]) == len(SEQUENCES[0])
        with meanwhile(lambda _: watched.fail_over()):
            for tokens in SEQUENCES[1:]:
                assert loaded(engine, tokens) <= len(tokens)
        watched.servers[0].kill()
        hits_come_back(lab, engine, watched.url)
        lab.close_all()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as made:
        yield made


def forget(server: RedisServer) -> None:
    call(server, "FLUSHALL")


def evict(server: RedisServer) -> None:
    """As under pressure: some of the values go, headers and parts alike."""
    for name in sorted(call(server, "KEYS", "*"))[::3]:
        call(server, "UNLINK", name)


@pytest.mark.parametrize("lose", [forget, evict])
def test_what_the_server_loses_under_a_cache_is_missed_and_stored_again(
    lab: RemoteLab, server: RedisServer, lose: Callable[[RedisServer], None]
) -> None:
    engine = filled(lab, server.url)
    matches = [engine.match(engine.sequence(tokens)) for tokens in SEQUENCES]
    assert all(match.tokens for match in matches)
    lose(server)
    for match in matches:
        loading = engine.begin_load(match)
        assert loading is not None
        engine.drive(loading)
        engine.check(loading)
        assert loading.outcome.end_token < match.tokens
    assert state(engine) == "ok", "to lose something is no fault"
    hits_come_back(lab, engine, server.url)
