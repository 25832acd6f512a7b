"""A cache that alone writes to a real store keeps its bound there, over a restart, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.interfaces import Listable
from kvtier.registry import connect
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import Tier
from tests.lib.cache_setup import CHUNK_BYTES, tier_stats, written
from tests.lib.redis_servers import redis_server
from tests.lib.remote_lab import RemoteLab, remote_lab, tokens_of

CAPACITY_BYTES = 6 * CHUNK_BYTES
SEQUENCES = [tokens_of(2, start=1000 * number) for number in range(6)]


def folder(place: Path) -> Iterator[str]:
    (place / "a").mkdir()
    yield f"file://{place}/a"


def encrypted_folders(place: Path) -> Iterator[str]:
    for name in ("a", "b", "c"):
        (place / name).mkdir()
    (place / "key").write_text("5a" * 32)
    stores = ",".join(f"{place}/{name}" for name in ("a", "b", "c"))
    yield f"encrypted+sharded+file://{stores}?encryption_key_file={place}/key"


def redis(place: Path) -> Iterator[str]:
    with redis_server(place / "redis") as server:
        yield server.url


@pytest.fixture(params=[folder, encrypted_folders, redis])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    make: Callable[[Path], Iterator[str]] = request.param
    yield from make(tmp_path)


@pytest.fixture
def lab(url: str, tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        lab.wrap = lambda _: connect(url)
        yield lab


def lying_bytes(url: str) -> int:
    """What the store holds of chunks, as somebody else lists it."""

    async def listed() -> int:
        connector = connect(url)
        assert isinstance(connector, Listable)
        infos = [info async for info in connector.list(b"")]
        await connector.close()
        return sum(info.nbytes for info in infos if info.key not in EPOCH_KEYS)

    return asyncio.run(listed())


def ready(engine: EngineDouble) -> None:
    """Wait until the store has been listed."""
    wait_until(
        lambda: tier_stats(engine.cache, Tier.REMOTE).state == "ok",
        f"not listed: {tier_stats(engine.cache, Tier.REMOTE)}",
    )


def test_the_bound_holds_in_the_store_and_over_a_restart(lab: RemoteLab, url: str) -> None:
    engine = lab.open(capacity_bytes=CAPACITY_BYTES, dram_chunks=8)
    ready(engine)
    for tokens in SEQUENCES:
        engine.store(engine.sequence(tokens))
        written(engine)
    lab.close(engine)
    held = lying_bytes(url)
    assert CAPACITY_BYTES // 2 < held <= CAPACITY_BYTES
    again = lab.open(capacity_bytes=CAPACITY_BYTES, dram_chunks=8)
    ready(again)
    assert tier_stats(again.cache, Tier.REMOTE).used_bytes == held
    newest = again.load(again.match(again.sequence(SEQUENCES[-1]))).outcome
    assert newest.tokens_by_tier == {Tier.REMOTE: len(SEQUENCES[-1])}
    assert again.match(again.sequence(SEQUENCES[0])).tokens == 0, "the oldest has gone"
    for tokens in SEQUENCES[:2]:
        again.store(again.sequence(tokens))
        written(again)
    lab.close(again)
    assert lying_bytes(url) <= CAPACITY_BYTES
