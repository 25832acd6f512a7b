"""A byte codec on the way to a remote: fewer bytes there, the same in memory, whoever wrote it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvtier.constants import REMOTE_STEP_BYTES
from kvtier.errors import MissingExtraError
from kvtier.obs.stats import TierStats
from kvtier.registry import byte_codecs
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.remote import incoming
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK_BYTES, SPLIT, ranks, written
from tests.lib.codec_room import CHUNK, CHUNKS, EXACT, LOSSY, Room
from tests.lib.outside_store import Store
from tests.lib.remote_lab import RemoteLab, remote_counters, remote_lab, tokens_of

TOKENS = CHUNKS * CHUNK


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    where = tmp_path / "remote"
    where.mkdir()
    return Store(f"file://{where}" if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture(params=["steps", "one step"])
def steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Objects that come in one read, and in several."""
    nbytes = 1 if request.param == "steps" else REMOTE_STEP_BYTES
    with mock.patch.object(incoming, "REMOTE_STEP_BYTES", nbytes):
        yield


def remote_of(room: Room) -> TierStats:
    return next(each for each in room.cache.stats().tiers if each.tier is Tier.REMOTE)


def stored(
    folder: Path, store: Store, remote_codec: str | None = "zstd", *, salt: str = ""
) -> None:
    before = store.nbytes
    room = Room(folder, "raw", remote=store.url, remote_codec=remote_codec)
    assert room.store(room.sequence(replace(EXACT, tenant_salt=salt)))
    assert remote_of(room).counters.written_bytes == store.nbytes - before
    room.close()


def test_fewer_bytes_lie_there_and_are_counted_as_they_are(tmp_path: Path, store: Store) -> None:
    stored(tmp_path, store, None)
    raw_bytes = store.nbytes
    store.empty()
    stored(tmp_path, store)
    assert store.nbytes < raw_bytes / 1.1
    room = Room(tmp_path, "raw", remote=store.url)
    assert room.load(room.sequence(EXACT)) is not None
    # A read is counted when it has ended, and the last section is used before.
    wait_until(lambda: remote_of(room).counters.read_bytes == store.nbytes, "not all is counted")
    room.close()


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("reader", ["zstd", None])
def test_whoever_is_configured_otherwise_reads_it_all_the_same(
    tmp_path: Path, store: Store, reader: str | None
) -> None:
    """What was read last tells how to read on, and is wrong here each time."""
    writers = {"first": "zstd", "second": None, "third": "zstd"}
    for salt, writer in writers.items():
        stored(tmp_path, store, writer, salt=salt)
    room = Room(tmp_path, "raw", remote=store.url, remote_codec=reader)
    for salt in writers:
        room.restored.poison()
        outcome = room.load(room.sequence(replace(EXACT, tenant_salt=salt)))
        assert outcome is not None
        assert outcome.tokens_by_tier == {Tier.REMOTE: TOKENS}
        assert room.error() == 0.0
    wait_until(lambda: remote_of(room).counters.read_bytes == store.nbytes, "not all is counted")
    counters = remote_of(room).counters
    assert (counters.corrupt_shards, counters.io_errors) == (0, 0)
    room.close()


def test_a_byte_codec_is_on_top_of_whatever_packed_a_chunk(tmp_path: Path, store: Store) -> None:
    room = Room(tmp_path, "int4-g128", remote=store.url, remote_codec="zstd")
    assert room.store(room.sequence(LOSSY))
    packed_bytes = room.cache.stats().tiers[0].used_bytes
    room.close()
    assert store.nbytes < packed_bytes
    room = Room(tmp_path, "raw", remote=store.url)
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert (outcome.tokens_by_tier, outcome.misses) == ({Tier.REMOTE: TOKENS}, ())
    room.close()


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("damage", ["header", "section", "cut", "zeros", "version", "length"])
def test_b78_damage_is_a_miss_and_is_written_anew(
    tmp_path: Path, store: Store, rng: random.Random, damage: str
) -> None:
    stored(tmp_path, store)
    info = rng.choice(store.listed())
    data = store.get(info)
    if damage == "header":
        data[rng.randrange(16, 1024)] ^= 1 << rng.randrange(8)
    elif damage == "section":
        data[rng.randrange(4096, len(data) * 7 // 8)] ^= 1 << rng.randrange(8)
    elif damage == "cut":
        del data[rng.randrange(1, len(data) * 7 // 8) :]
    elif damage == "zeros":
        start = 4096 * rng.randrange(len(data) // 4096 * 7 // 8)
        data[start : start + 4096] = bytes(4096)
    else:
        place = 4 if damage == "version" else 8
        data[place : place + 4] = (1 << rng.randrange(3, 32)).to_bytes(4, "little")
    store.put(info.key, bytes(data))
    room = Room(tmp_path, "raw", remote=store.url, remote_codec="zstd")
    outcome = room.load(room.sequence(EXACT))
    assert outcome is None or outcome.end_token < TOKENS, "damaged bytes were served"
    assert remote_of(room).counters.corrupt_shards == 1
    wait_until(lambda: len(store.listed()) == CHUNKS - 1, "it is not deleted")
    assert room.store(room.sequence(EXACT))
    room.close()
    assert len(store.listed()) == CHUNKS, "it is written again"
    room = Room(tmp_path, "raw", remote=store.url)
    assert room.load(room.sequence(EXACT)) is not None
    assert room.error() == 0.0
    room.close()


def test_b78_one_chunk_in_the_place_of_another_is_a_miss(tmp_path: Path, store: Store) -> None:
    stored(tmp_path, store)
    first, second, *_ = store.listed()
    store.put(first.key, bytes(store.get(second)))
    room = Room(tmp_path, "raw", remote=store.url)
    outcome = room.load(room.sequence(EXACT))
    assert outcome is None or outcome.end_token < TOKENS
    assert remote_of(room).counters.corrupt_shards == 1
    room.close()


def test_without_the_extra_it_is_a_miss_and_stays(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, store)

    def missing(name: str) -> object:
        raise MissingExtraError(name)

    monkeypatch.setattr(byte_codecs, "load", missing)
    room = Room(tmp_path, "raw", remote=store.url)
    outcome = room.load(room.sequence(EXACT))
    assert outcome is not None
    assert outcome.end_token == 0
    assert [miss.reason for miss in outcome.misses] == [MissReason.CODEC]
    assert remote_of(room).state == "ok"
    room.close()
    assert len(store.listed()) == CHUNKS
    with pytest.raises(MissingExtraError):
        Room(tmp_path, "raw", remote=store.url, remote_codec="zstd")


def test_a_bound_is_of_the_bytes_that_lie_there(tmp_path: Path, store: Store) -> None:
    """What holds two raw chunks holds three encoded ones."""
    stored(tmp_path, store)
    needed = store.nbytes
    store.empty()
    room = Room(tmp_path, "raw", remote=store.url, remote_codec="zstd", remote_bytes=needed)
    wait_until(lambda: remote_of(room).state == "ok", "it is not listed")
    assert room.store(room.sequence(EXACT))
    remote = remote_of(room)
    assert (remote.chunks, remote.used_bytes, remote.capacity_bytes) == (CHUNKS, needed, needed)
    assert remote.counters.evicted_chunks == 0
    room.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


@pytest.mark.usefixtures("steps")
def test_shards_of_several_ranks_come_side_by_side(lab: RemoteLab) -> None:
    tokens = tokens_of(4)
    engine = lab.filled(tokens, SPLIT, placements=ranks(2), byte_codec="zstd")
    assert len(lab.remote.objects()) == 8
    load = engine.load(engine.match(engine.sequence(tokens)))
    assert load.outcome.end_token == len(tokens)
    assert remote_counters(engine).corrupt_shards == 0


def test_what_is_retried_and_refused_gives_its_memory_back(lab: RemoteLab) -> None:
    """However a write ends, nothing stays pinned, and what is counted is what lies there."""
    engine = lab.open(byte_codec="zstd", capacity_bytes=2 * CHUNK_BYTES)
    lab.remote.loses = True
    lab.remote.twist["write"] = lambda answer: answer[1:]
    engine.store(engine.sequence(tokens_of(1)))
    wait_until(lambda: remote_counters(engine).io_errors > 0, "no fault")
    lab.remote.twist.clear()
    lab.remote.loses = False
    for start in range(1000, 9000, 1000):
        engine.store(engine.sequence(tokens_of(1, start=start)))
    written(engine)
    engine.cache.check_integrity()
    assert all(tier.pinned_chunks == 0 for tier in engine.cache.stats().tiers)
