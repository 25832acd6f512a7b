"""What a cache tells of its tiers: a reader's picture is never more than the truth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.keys import encode_tokens
from kvtier.obs.events import Cleared, Event, Removed, Stored
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import ChunkKey, Tier
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    NAMESPACE,
    settle,
    tier_stats,
    written,
)
from tests.lib.remote_lab import ToyRemote

Picture = dict[ChunkKey, set[Tier]]


class Reader:
    """Believes what it is told."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.picture: Picture = {}
        self.tokens: dict[ChunkKey, bytes] = {}
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        self.events: list[Event] = []

    def read(self) -> Picture:
        assert self.cache.events is not None
        while events := self.cache.events.take(8):
            for event in events:
                self._believe(event)
        return self.picture

    def _believe(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Cleared):
            self.picture.clear()
        elif isinstance(event, Removed):
            self.picture[event.key].remove(event.tier)
            if not self.picture[event.key]:
                del self.picture[event.key]
        else:
            parent = event.content.parent
            assert parent is None or parent in self.picture, "the parent is told first"
            self.picture.setdefault(event.key, set()).add(event.tier)
            self.tokens[event.key] = event.content.tokens
            self.parents[event.key] = parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


class Opened:
    def __init__(
        self,
        folder: Path,
        *,
        dram_chunks: int = 8,
        disk_chunks: int = 32,
        remote: ToyRemote | None = None,
        remote_chunks: int = 0,
    ) -> None:
        """``remote`` takes the place of the disk; with ``remote_chunks`` nobody else uses it."""
        config = CacheConfig(
            dram_bytes=dram_chunks * CHUNK_BYTES,
            disk=None if remote else DiskConfig(str(folder), disk_chunks * CHUNK_BYTES),
            remotes=(RemoteConfig("toy://", remote_chunks * CHUNK_BYTES),) if remote else (),
            slab_bytes=4096,
            events=True,
        )
        self.cache = Cache(config, connect=lambda _: remote or ToyRemote())
        self.engine = EngineDouble(self.cache, NAMESPACE, block_tokens=BLOCK, block_count=96)
        self.reader = Reader(self.cache)

    def store(self, tokens: range) -> list[ChunkKey]:
        sequence = self.engine.sequence(tokens)
        assert self.engine.store(sequence)
        written(self.engine)
        return sequence.chunk_keys

    def close(self) -> None:
        settle(self.engine)
        self.engine.close()
        self.cache.close()


@pytest.fixture
def opened(folder: Path) -> Iterator[Opened]:
    opened = Opened(folder)
    yield opened
    opened.close()


def test_a_chunk_is_told_in_each_tier_with_its_tokens_and_its_parent(opened: Opened) -> None:
    keys = opened.store(range(3 * CHUNK))
    assert opened.reader.read() == {key: {Tier.DRAM, Tier.DISK} for key in keys}
    assert opened.reader.parents == dict(zip(keys, [None, *keys[:-1]], strict=True))
    for index, key in enumerate(keys):
        tokens = range(index * CHUNK, (index + 1) * CHUNK)
        assert opened.reader.tokens[key] == encode_tokens(tokens)


def test_what_leaves_dram_is_told(opened: Opened) -> None:
    first = opened.store(range(2 * CHUNK))
    for start in range(1000, 1000 + 4 * 2 * CHUNK, 2 * CHUNK):
        opened.store(range(start, start + 2 * CHUNK))
    picture = opened.reader.read()
    assert [picture[key] for key in first] == [{Tier.DISK}] * 2
    assert sum(Tier.DRAM in tiers for tiers in picture.values()) == 8


def test_what_an_index_at_rest_brings_back_is_told_when_it_is_used(folder: Path) -> None:
    opened = Opened(folder)
    keys = opened.store(range(3 * CHUNK))
    opened.close()
    opened = Opened(folder)
    sequence = opened.engine.sequence(range(3 * CHUNK))
    wait_until(lambda: bool(opened.engine.match(sequence).hits), "the disk does not open")
    assert opened.reader.read() == {}, "nobody knows their tokens yet"
    loaded = opened.engine.load(opened.engine.match(sequence))
    opened.engine.check(loaded)
    settle(opened.engine)
    assert opened.reader.read() == {key: {Tier.DRAM, Tier.DISK} for key in keys}
    opened.close()


def test_b168_a_chunk_in_the_middle_comes_back_under_its_parent(opened: Opened) -> None:
    keys = opened.store(range(4 * CHUNK))
    assert opened.cache.remove([keys[0], keys[2]]) == [True, True]
    assert set(opened.reader.read()) == {keys[1], keys[3]}
    opened.store(range(4 * CHUNK))
    assert set(opened.reader.read()) == set(keys)
    assert opened.reader.parents == dict(zip(keys, [None, *keys[:-1]], strict=True))


def test_an_epoch_that_ends_takes_back_what_was_told(opened: Opened) -> None:
    opened.store(range(3 * CHUNK))
    assert len(opened.reader.read()) == 3
    stale = opened.engine.match(opened.engine.sequence(range(3 * CHUNK)))
    opened.cache.invalidate(NAMESPACE)
    assert opened.reader.read() == {}
    opened.cache.note_admission(stale, 0, 3 * CHUNK)
    assert opened.reader.read() == {}, "nobody can ask for these any more"
    new = opened.store(range(3 * CHUNK))
    assert set(opened.reader.read()) == set(new)


def test_a_new_reader_is_told_everything(opened: Opened) -> None:
    opened.store(range(3 * CHUNK))
    before = dict(opened.reader.read())
    assert opened.cache.events is not None
    opened.cache.events.begin_anew()
    late = Reader(opened.cache)
    assert late.read() == before
    assert isinstance(late.events[0], Cleared)
    assert late.tokens == opened.reader.tokens


def test_b168_the_picture_is_what_the_tiers_hold(folder: Path, rng: random.Random) -> None:
    """After stores and loads in any order, with evictions from both tiers."""
    opened = Opened(folder, dram_chunks=6, disk_chunks=14)
    for _ in range(40):
        start = rng.randrange(5) * 1000
        sequence = opened.engine.sequence(range(start, start + rng.randint(1, 5) * CHUNK))
        match = opened.engine.match(sequence)
        if match.hits and rng.random() < 0.5:
            opened.cache.note_admission(match, 0, sequence.token_count)
            opened.engine.load(match)
        else:
            opened.engine.store(sequence)
        if rng.random() < 0.3:
            written(opened.engine)
            settle(opened.engine)
            picture = opened.reader.read()
            for tier in (Tier.DRAM, Tier.DISK):
                told = sum(tier in tiers for tiers in picture.values())
                assert told == tier_stats(opened.cache, tier).chunks
    kinds = {type(event) for event in opened.reader.events}
    assert kinds == {Stored, Removed}
    opened.close()


def test_what_lies_in_a_remote_of_ones_own_is_told(folder: Path) -> None:
    remote = ToyRemote()
    opened = Opened(folder, remote=remote, remote_chunks=4)
    keys = opened.store(range(3 * CHUNK))
    assert opened.reader.read() == {key: {Tier.DRAM, Tier.REMOTE} for key in keys}
    opened.store(range(1000, 1000 + 3 * CHUNK))
    picture = opened.reader.read()
    held = tier_stats(opened.cache, Tier.REMOTE).chunks
    assert sum(Tier.REMOTE in tiers for tiers in picture.values()) == held == 4
    opened.close()


def test_what_others_write_to_is_nobodys_to_tell_of(folder: Path) -> None:
    opened = Opened(folder, remote=ToyRemote())
    keys = opened.store(range(2 * CHUNK))
    assert opened.reader.read() == {key: {Tier.DRAM} for key in keys}
    opened.close()


def test_without_the_setting_nothing_is_kept(folder: Path) -> None:
    cache = Cache(CacheConfig(dram_bytes=8 * CHUNK_BYTES, slab_bytes=4096))
    assert cache.events is None
    cache.close()


def test_what_waits_to_be_told_is_a_stored_chunk(opened: Opened) -> None:
    opened.store(range(CHUNK))
    assert opened.cache.events is not None
    assert [type(event) for event in opened.cache.events.take(100)] == [Stored, Stored]
