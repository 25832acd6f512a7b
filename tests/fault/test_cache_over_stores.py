"""A cache over real stores that are killed or frozen, that others write to, and whose time jumps.

No wrong byte, no hang: what is asked meanwhile is computed, the breaker closes again once the store
is back, and hits come back with it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.shard_format import ShardDescription, parse_header, seal, verify_section
from kvtier.testing.connector_contract import put
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason, Tier, WriteItem
from kvtier_connectors.decorators import Decorator
from kvtier_connectors.decorators.encrypted import Encrypted
from kvtier_connectors.memory import MemoryConnector
from tests.lib.cache_setup import CHUNK, tier_stats, written
from tests.lib.one_key import OneKey
from tests.lib.real_stores import STORES, Store, real_store
from tests.lib.remote_lab import RemoteLab, chunk_of, remote_lab, tokens_of
from tests.lib.s3_servers import use_credentials

OPERATIONS = 1000
SEQUENCES = [tokens_of(3, start=1000 * number) for number in range(30)]
#: A lookup and a load that wait until their deadlines, and a machine that has other things to do.
OPERATION_S_MAX = 20.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


@pytest.fixture(scope="module", params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        use_credentials(patch)
        with real_store(request.param, tmp_path_factory.mktemp("stores") / "store") as made:
            yield made


class Traffic:
    """Stores and loads small chunks, most of which lie in the store alone."""

    def __init__(self, engine: EngineDouble, rng: random.Random) -> None:
        self.engine = engine
        self.done = 0
        self._rng = rng

    def run(self, count: int) -> set[Tier]:
        """Do so many operations; return the tiers that served. Every byte is looked at."""
        served: set[Tier] = set()
        for _ in range(count):
            begun_s = time.monotonic()
            served |= self._one()
            assert time.monotonic() - begun_s < OPERATION_S_MAX
        self.done += count
        return served

    def run_until_open(self) -> None:
        """Operate until the store's breaker opens."""
        for _ in range(OPERATIONS):
            self.run(1)
            if self.state() != "ok":
                return
        raise AssertionError("the breaker does not open")

    def run_until_served(self) -> None:
        """Operate until something comes from the store."""
        assert any(Tier.REMOTE in self.run(1) for _ in range(OPERATIONS)), "hits do not come back"

    def state(self) -> str:
        return tier_stats(self.engine.cache, Tier.REMOTE).state

    def _one(self) -> set[Tier]:
        sequence = self.engine.sequence(self._rng.choice(SEQUENCES))
        if self._rng.random() < 0.4:
            self.engine.store(sequence)
            return set()
        match = self.engine.match(sequence)
        return set(self.engine.load(match).outcome.tokens_by_tier) if match.tokens else set()


def over(lab: RemoteLab, store: Store, rng: random.Random) -> Traffic:
    lab.wrap = lambda _: connect(store.url)
    return Traffic(lab.open(dram_chunks=8, load_deadline_s=5.0, pending_deadline_s=2.0), rng)


def test_b73_a_store_killed_within_many_operations_is_survived(
    lab: RemoteLab, store: Store, rng: random.Random
) -> None:
    traffic = over(lab, store, rng)
    assert Tier.REMOTE in traffic.run(OPERATIONS // 3)
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(store.kill)
        traffic.run(OPERATIONS // 10)
        killing.result()
    traffic.run(1)  # Whatever it still had in hand.
    assert Tier.REMOTE not in traffic.run(OPERATIONS // 3)
    assert traffic.state() == "failing"
    store.start()
    wait_until(lambda: traffic.state() == "ok", "the breaker does not close")
    assert Tier.REMOTE in traffic.run(OPERATIONS - traffic.done)
    assert traffic.state() == "ok"


def test_a_frozen_store_costs_time_once_and_is_used_again(
    lab: RemoteLab, store: Store, rng: random.Random
) -> None:
    """As when its machine sleeps: for whoever waits, its clock stands still and then jumps."""
    traffic = over(lab, store, rng)
    assert Tier.REMOTE in traffic.run(60)
    store.freeze()
    try:
        traffic.run_until_open()
        assert Tier.REMOTE not in traffic.run(100)
    finally:
        store.thaw()
    wait_until(lambda: traffic.state() == "ok", "the breaker does not close")
    traffic.run_until_served()


def test_a_wall_clock_that_jumps_costs_misses_at_most(
    lab: RemoteLab, store: Store, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 refuses what is signed at another time than its own; nobody else looks."""
    traffic = over(lab, store, rng)
    assert Tier.REMOTE in traffic.run(60)
    for days in (1, -400):
        with monkeypatch.context() as patch:
            jump(patch, days)
            assert (Tier.REMOTE in traffic.run(60)) == (not store.url.startswith("s3"))
        traffic.run_until_served()
        # What is new is taken, and with it the store is well again.
        engine = traffic.engine
        engine.store(engine.sequence(tokens_of(1, start=300_000 + 1000 * abs(days))))
        written(engine)
        assert traffic.state() == "ok"


def jump(patch: pytest.MonkeyPatch, days: int) -> None:
    """Set this process's wall clock; what measures by another one goes on."""
    seconds, nanoseconds, botocore = time.time, time.time_ns, "botocore.auth.get_current_datetime"
    patch.setattr(time, "time", lambda: seconds() + 86_400 * days)
    patch.setattr(time, "time_ns", lambda: nanoseconds() + 86_400 * days * 10**9)
    then = dt.timedelta(days=days)
    patch.setattr(botocore, lambda: dt.datetime.now(dt.UTC).replace(tzinfo=None) + then)


class Seen(Decorator):
    """Remembers the chunks that are written through it."""

    def __init__(self, inner: Connector, objects: dict[bytes, bytes]) -> None:
        super().__init__(inner)
        self._objects = objects

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        found = {item.key: bytes(item.data) for item in items if item.key not in EPOCH_KEYS}
        self._objects.update(found)
        return await super().write(items)


def others_write(url: str, objects: dict[bytes, bytes]) -> None:
    """Somebody else writes objects."""

    async def write() -> None:
        connector = connect(url)
        await put(connector, objects)
        await connector.close()

    asyncio.run(write())


def in_store(
    lab: RemoteLab, open_store: Callable[[], Connector], tokens: range
) -> tuple[EngineDouble, list[dict[bytes, bytes]]]:
    """Store a sequence and restart: it lies in the store alone. Return its chunks' objects, too."""
    objects: dict[bytes, bytes] = {}
    lab.wrap = lambda _: Seen(open_store(), objects)
    engine = lab.open()
    engine.store(engine.sequence(tokens))
    written(engine)
    keys = engine.sequence(tokens).chunk_keys
    lab.close(engine)
    chunks = [{name: objects[name] for name in chunk_of(key, objects)} for key in keys]
    assert all(chunks)
    return lab.open(), chunks


def comes_back(lab: RemoteLab, engine: EngineDouble, tokens: range) -> None:
    """What is missed is stored again, and found after a restart."""
    for _ in range(len(tokens) // CHUNK):
        engine.store(engine.sequence(tokens))
        written(engine)
        lab.close(engine)
        engine = lab.open()
        match = engine.match(engine.sequence(tokens))
        if match.tokens and engine.load(match).outcome.end_token == len(tokens):
            return
    raise AssertionError("hits do not come back")


def missed(engine: EngineDouble, tokens: range, chunk: int) -> None:
    """Load what is there before a chunk that is not what it should be; the breaker stays closed."""
    outcome = engine.load(engine.match(engine.sequence(tokens))).outcome
    assert outcome.end_token == chunk * CHUNK
    assert {miss.reason for miss in outcome.misses} == {MissReason.CORRUPT}
    assert tier_stats(engine.cache, Tier.REMOTE).state == "ok"


SPOILED = 2
CHANGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "overwritten": lambda own, other: bytes(len(own)),
    "truncated": lambda own, other: own[: len(own) - 4096],
    "cut short": lambda own, other: own[:100],
    "emptied": lambda own, other: b"",
    "swapped": lambda own, other: other,
    "longer": lambda own, other: own[:8000] + other,
}


@pytest.mark.parametrize("change", CHANGES)
def test_b78_what_others_do_to_an_object_is_a_miss_and_is_written_anew(
    lab: RemoteLab, store: Store, change: str
) -> None:
    tokens = tokens_of(4, start=100_000 + 1000 * list(CHANGES).index(change))
    engine, chunks = in_store(lab, lambda: connect(store.url), tokens)
    own, other = chunks[SPOILED], chunks[SPOILED + 1]
    pairs = zip(own, other, strict=True)
    others_write(store.url, {a: CHANGES[change](own[a], other[b]) for a, b in pairs})
    missed(engine, tokens, SPOILED)
    comes_back(lab, engine, tokens)


def forged(shard: bytes) -> bytes:
    """Another KV under a shard's name, whole and sound by all that the format says."""
    slot = bytearray(shard)
    header = parse_header(memoryview(shard))
    slot[header.section_offsets[-1]] ^= 1
    known = {field.name: getattr(header, field.name) for field in fields(ShardDescription)}
    sealed = seal(memoryview(slot), ShardDescription(**known))
    for section in range(len(sealed.section_bytes)):
        verify_section(memoryview(slot), sealed, section)
    return bytes(slot)


@pytest.mark.parametrize("forger", ["without a key", "with a key of its own"])
def test_b102_a_forged_object_is_a_miss_where_objects_are_encrypted(
    lab: RemoteLab, store: Store, forger: str
) -> None:
    """Whoever can write to the store sees its names, and knows the format."""
    tokens = tokens_of(4, start=200_000 + 1000 * len(forger))
    stored: dict[bytes, bytes] = {}

    def open_store() -> Connector:
        return Encrypted(Seen(connect(store.url), stored), OneKey(5), "")

    engine, chunks = in_store(lab, open_store, tokens)
    names = {name: own for name in chunks[SPOILED] for own in stored if own.endswith(name)}
    false = {name: forged(shard) for name, shard in chunks[SPOILED].items()}
    if "own" in forger:
        false = encrypted_by(OneKey(6), false)
    others_write(store.url, {own: false[name] for name, own in names.items()})
    missed(engine, tokens, SPOILED)
    comes_back(lab, engine, tokens)


def encrypted_by(keys: OneKey, objects: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return objects as they are stored with another key, by their own names."""
    stored: dict[bytes, bytes] = {}
    asyncio.run(put(Encrypted(Seen(MemoryConnector(), stored), keys, ""), objects))
    return {name: stored[own] for name in objects for own in stored if own.endswith(name)}


def test_those_with_different_keys_leave_each_others_objects_alone(
    lab: RemoteLab, store: Store
) -> None:
    """Or each would find the other's useless and write its own over them, for ever."""
    tokens = tokens_of(4, start=250_000)
    stored: dict[bytes, bytes] = {}

    def with_key(value: int) -> Callable[[], Connector]:
        return lambda: Encrypted(Seen(connect(store.url), stored), OneKey(value), "")

    for value in (7, 8):
        lab.close(in_store(lab, with_key(value), tokens)[0])
    before = dict(stored)
    for value in (7, 8, 7, 8):
        lab.wrap = lambda _, value=value: with_key(value)()  # type: ignore[misc]
        engine = lab.open()
        match = engine.match(engine.sequence(tokens))
        assert engine.load(match).outcome.end_token == len(tokens)
        lab.close(engine)
    assert stored == before, "something was written over"
