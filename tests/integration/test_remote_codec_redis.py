"""A byte codec on the way to a real Redis: fewer bytes there, verified when they come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis

from kvtier.keys import shard_key
from kvtier.types import ShardId, Tier
from tests.lib.codec_room import CHUNK, CHUNKS, EXACT, Room
from tests.lib.outside_store import Store
from tests.lib.redis_servers import redis_server

TOKENS = CHUNKS * CHUNK


def held_bytes(url: str) -> int:
    """What all values take, as the server tells it."""
    with redis.Redis.from_url(url) as client:
        return sum(int(client.strlen(key)) for key in client.scan_iter("*"))


def stored(folder: Path, url: str, remote_codec: str | None) -> None:
    room = Room(folder, "raw", remote=url, remote_codec=remote_codec)
    assert room.store(room.sequence(EXACT))
    room.close()


def test_one_host_compresses_and_another_one_reads(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        stored(tmp_path, server.url, None)
        raw_bytes = held_bytes(server.url)
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        stored(tmp_path, server.url, "zstd")
        assert held_bytes(server.url) < raw_bytes / 1.1
        room = Room(tmp_path, "raw", remote=server.url)
        outcome = room.load(room.sequence(EXACT))
        assert outcome is not None
        assert (outcome.tokens_by_tier, outcome.misses) == ({Tier.REMOTE: TOKENS}, ())
        assert room.error() == 0.0
        room.close()


@pytest.mark.parametrize("damage", ["header", "section", "cut"])
def test_b78_what_redis_gives_back_damaged_is_a_miss(
    tmp_path: Path, rng: random.Random, damage: str
) -> None:
    with redis_server(tmp_path) as server:
        stored(tmp_path, server.url, "zstd")
        room = Room(tmp_path, "raw", remote=server.url, remote_codec="zstd")
        chunk = rng.choice(room.sequence(EXACT).chunk_keys)
        store = Store(server.url)
        data = store.read(shard_key(chunk, ShardId(0, 0, 0)), 1 << 20)
        if damage == "cut":
            del data[rng.randrange(1, len(data) * 7 // 8) :]
        else:
            place = rng.randrange(16, 1024) if damage == "header" else rng.randrange(4096, 20_000)
            data[place] ^= 1 << rng.randrange(8)
        store.put(shard_key(chunk, ShardId(0, 0, 0)), bytes(data))
        outcome = room.load(room.sequence(EXACT))
        assert outcome is None or outcome.end_token < TOKENS
        assert room.cache.stats().tiers[-1].counters.corrupt_shards == 1
        assert room.store(room.sequence(EXACT)), "it is written again"
        room.close()
        room = Room(tmp_path, "raw", remote=server.url)
        outcome = room.load(room.sequence(EXACT))
        assert outcome is not None
        assert outcome.end_token == TOKENS
        assert room.error() == 0.0
        room.close()
