"""Every codec over connectors that need no server: what is put can be counted and got."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.interfaces import Listable
from kvtier.registry import connect
from kvtier.types import KeyInfo, MissReason, Tier
from tests.lib.codec_room import CHUNK, CHUNKS, EXACT, LOSSY, Room

CODECS = [("raw", 0.0), ("lossless", 0.0), ("int8", 0.05), ("fp8", 0.3), ("int5k4v", 1.0)]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that outlives the caches over it."""
    address = f"file://{tmp_path}" if request.param == "file" else f"memory://{tmp_path.name}"
    keeper = connect(address)
    yield address
    del keeper


def listed(url: str) -> list[KeyInfo]:
    async def gather() -> list[KeyInfo]:
        connector = connect(url)
        assert isinstance(connector, Listable)
        found = [info async for info in connector.list(b"")]
        await connector.close()
        return found

    return asyncio.run(gather())


def sequence_of(room: Room, tokens: range) -> Sequence:
    sequence = room.cache.sequence(LOSSY)
    sequence.append(tokens)
    return sequence


@pytest.mark.parametrize(("codec", "error_max"), CODECS)
def test_b146_what_a_codec_packs_is_there_and_comes_back(
    tmp_path: Path, url: str, codec: str, error_max: float
) -> None:
    namespace = EXACT if error_max == 0 else LOSSY
    room = Room(tmp_path, codec, remote=url)
    assert room.store(room.sequence(namespace))
    room.close()
    assert len(listed(url)) == CHUNKS
    room = Room(tmp_path, codec, remote=url)
    outcome = room.load(room.sequence(namespace))
    assert outcome is not None
    assert (outcome.tokens_by_tier, outcome.misses) == ({Tier.REMOTE: CHUNKS * CHUNK}, ())
    assert room.error() <= error_max
    room.close()


@pytest.mark.parametrize(("codec", "error_max"), CODECS)
@pytest.mark.parametrize("reader", ["raw", "int8"])
def test_whoever_packs_otherwise_reads_it_all_the_same(
    tmp_path: Path, url: str, codec: str, error_max: float, reader: str
) -> None:
    """One chunk has one address, whatever its codec; the header says which it is."""
    room = Room(tmp_path, codec, remote=url)
    assert room.store(room.sequence(LOSSY))
    room.close()
    room = Room(tmp_path, reader, remote=url)
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert (outcome.tokens_by_tier, outcome.misses) == ({Tier.REMOTE: CHUNKS * CHUNK}, ())
    assert room.error() <= error_max
    tier = next(each for each in room.cache.stats().tiers if each.tier is Tier.REMOTE)
    assert (tier.counters.corrupt_shards, tier.counters.io_errors) == (0, 0)
    room.close()
    assert len(listed(url)) == CHUNKS


def test_what_this_process_cannot_unpack_is_a_miss_and_stays(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path, "int5k4v", remote=url)
    assert room.store(room.sequence(LOSSY))
    room.close()
    room = Room(tmp_path, "raw", remote=url)
    monkeypatch.setattr(room.cache.codecs, "readable", lambda name, _: name == "raw")
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.end_token == 0
    assert outcome.misses[0].reason in {MissReason.CODEC, MissReason.UNAVAILABLE}
    room.close()
    assert len(listed(url)) == CHUNKS


def test_what_cannot_be_unpacked_keeps_nothing_else_of_the_model_away(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with another calibration, or of a later release, shares the store."""
    tokens = {"int5k4v": range(CHUNKS * CHUNK), "raw": range(1000, 1000 + CHUNKS * CHUNK)}
    for codec, stored in tokens.items():
        room = Room(tmp_path, codec, remote=url)
        assert room.store(sequence_of(room, stored))
        room.close()
    room = Room(tmp_path, "raw", remote=url)
    monkeypatch.setattr(room.cache.codecs, "readable", lambda name, _: name == "raw")
    for _ in range(2):
        missed = room.load(sequence_of(room, tokens["int5k4v"]))
        assert missed is None or missed.end_token == 0
        sequence = sequence_of(room, tokens["raw"])
        outcome = room.load(sequence)
        assert outcome is not None
        assert (outcome.tokens_by_tier, outcome.misses) == ({Tier.REMOTE: CHUNKS * CHUNK}, ())
        room.cache.holdings.evict(reversed(sequence.chunk_keys), [Tier.DRAM])
    tried = missed
    room.close()
    assert tried is None, "its headers have been read before"
