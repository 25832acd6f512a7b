"""A byte codec below DRAM: fewer bytes on disk, the same in memory, books in stored bytes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.admission.everything import Everything
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import MissingExtraError
from kvtier.registry import admissions, byte_codecs
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Verifier
from kvtier.types import Entry, MissReason, Tier
from tests.lib.codec_room import CHUNK, CHUNKS, EXACT, LOSSY, Room, bytes_below

TOKENS = CHUNKS * CHUNK


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Directories whose shards are all sound in the end."""
    yield tmp_path
    assert verified(tmp_path) == []


def roots(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("disk*"))]


def verified(folder: Path) -> list[str]:
    verifier = Verifier(roots(folder), LocalFiles())
    list(verifier.run())
    return [finding.problem for finding in verifier.verdict.findings]


def stored(folder: Path, *, disk_codec: str = "zstd", codec: str = "raw") -> None:
    room = Room(folder, codec, disk_codec)
    assert room.store(room.sequence(EXACT if codec == "raw" else LOSSY))
    room.close()


def test_fewer_bytes_lie_on_disk_and_are_counted_as_they_are(folder: Path) -> None:
    plain = Room(folder / "plain", "raw")
    plain.store(plain.sequence(EXACT))
    raw_bytes = plain.cache.stats().tiers[1].used_bytes
    dram_bytes = plain.cache.stats().tiers[0].used_bytes
    plain.close()
    room = Room(folder, "raw", "zstd")
    room.store(room.sequence(EXACT))
    dram, disk = room.cache.stats().tiers
    assert dram.used_bytes == dram_bytes, "DRAM holds what it always holds"
    assert disk.used_bytes < raw_bytes / 1.1
    assert disk.used_bytes == bytes_below(folder / "disk") == disk.counters.written_bytes
    room.close()
    room = Room(folder, "raw", "zstd")
    assert room.load(room.sequence(EXACT)) is not None
    after = room.cache.stats().tiers[1]
    assert after.used_bytes == after.counters.read_bytes == disk.used_bytes
    room.close()


def served_in_the_end(room: Room) -> None:
    """Load all, once every directory is open."""

    def served() -> bool:
        outcome = room.load(room.sequence(EXACT))
        return outcome is not None and outcome.end_token == TOKENS

    wait_until(served, "a load")


@pytest.mark.parametrize("lose_index", [False, True])
@pytest.mark.parametrize("directories", [1, 3])
def test_a_restart_serves_it_from_every_directory(
    folder: Path, directories: int, *, lose_index: bool
) -> None:
    room = Room(folder, "raw", "zstd", directories=directories)
    assert room.store(room.sequence(EXACT))
    before = room.cache.stats().tiers[1].used_bytes
    room.close()
    if lose_index:
        for root in roots(folder):
            shutil.rmtree(Path(root, "index"))
    for disk_codec in ("zstd", None):  # What is configured decides about writes alone.
        room = Room(folder, "raw", disk_codec, directories=directories)
        served_in_the_end(room)
        assert room.error() == 0.0
        assert room.cache.stats().tiers[1].used_bytes == before
        room.close()


def test_a_codec_of_the_disk_and_a_byte_codec_go_together(folder: Path) -> None:
    """DRAM has int8; the disk packs the pool's own bits, in fewer bytes."""
    stored(folder, codec="int8", disk_codec="raw+zstd")
    room = Room(folder, "int8", "raw+zstd")
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.tokens_by_tier == {Tier.DISK: TOKENS}
    assert room.error() == 0.0
    room.close()


def test_what_does_not_shrink_is_stored_as_it_is(folder: Path) -> None:
    stored(folder / "plain", codec="int8", disk_codec="int8")
    stored(folder, codec="int8", disk_codec="zstd")
    assert bytes_below(folder / "disk") <= bytes_below(folder / "plain")


def test_capacity_is_of_stored_bytes(folder: Path) -> None:
    """A bound that two raw chunks fill holds three encoded ones."""
    room = Room(folder, "raw", "zstd")
    room.store(room.sequence(EXACT))
    needed = room.cache.stats().tiers[1].used_bytes
    room.close()
    shutil.rmtree(folder / "disk")
    room = Room(folder, "raw", "zstd", disk_bytes=needed)
    room.store(room.sequence(EXACT))
    disk = room.cache.stats().tiers[1]
    assert (disk.chunks, disk.used_bytes, disk.capacity_bytes) == (CHUNKS, needed, needed)
    room.close()


@pytest.mark.parametrize("damage", ["bit", "cut", "zeros"])
def test_b78_damage_is_a_miss_and_goes_to_quarantine(
    tmp_path: Path, rng: random.Random, damage: str
) -> None:
    stored(tmp_path)
    path = rng.choice(sorted((tmp_path / "disk" / "shards").rglob("*.kvs")))
    data = bytearray(path.read_bytes())
    if damage == "bit":
        bit = rng.randrange(8 * (len(data) * 7 // 8))
        data[bit // 8] ^= 1 << bit % 8
    elif damage == "cut":
        del data[4096 * rng.randrange(len(data) // 4096 * 7 // 8) :]
    else:
        start = 4096 * rng.randrange(len(data) // 4096 * 7 // 8)
        data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)
    assert verified(tmp_path)[:1] == ["corrupt"]
    room = Room(tmp_path, "raw", "zstd")
    outcome = room.load(room.sequence(EXACT))
    lost = outcome is None or outcome.end_token < TOKENS
    assert lost, "damaged bytes were served"
    assert room.cache.stats().tiers[1].counters.corrupt_shards == 1
    assert room.store(room.sequence(EXACT)), "it is written again"
    room.close()
    room = Room(tmp_path, "raw", "zstd")
    assert room.load(room.sequence(EXACT)) is not None
    assert room.error() == 0.0
    room.close()


def test_what_was_encoded_wrong_is_found_by_a_full_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored bytes are as they were written; what they decode to is not the shard."""

    def zeros(codec: ZstdCodec, source: memoryview, width: int, into: memoryview) -> int:
        return encode(codec, memoryview(bytes(len(source))), width, into)

    encode = ZstdCodec.encode
    monkeypatch.setattr(ZstdCodec, "encode", zeros)
    stored(tmp_path)
    assert verified(tmp_path) == ["corrupt"] * CHUNKS
    room = Room(tmp_path, "raw", "zstd")
    outcome = room.load(room.sequence(EXACT))
    assert outcome is not None
    assert outcome.end_token == 0
    room.close()


def test_without_the_extra_it_is_a_miss_and_no_fault_of_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(folder)

    def missing(name: str) -> object:
        raise MissingExtraError(name)

    monkeypatch.setattr(byte_codecs, "load", missing)
    room = Room(folder, "raw")
    for _ in range(4):
        outcome = room.load(room.sequence(EXACT))
        assert outcome is not None
        assert outcome.end_token == 0
        assert [miss.reason for miss in outcome.misses] == [MissReason.CODEC]
    disk = room.cache.stats().tiers[1]
    assert (disk.state, disk.chunks, disk.quarantined_files) == ("ok", CHUNKS, 0)
    assert verified(folder) == [], "what is stored is sound"
    room.close()
    with pytest.raises(MissingExtraError):
        Room(folder, "raw", "zstd")


class Counting(Everything):
    """Wants everything, and notes how many bytes each offer had."""

    def __init__(self, offers: list[int]) -> None:
        super().__init__(1)
        self._offers = offers

    def offer(self, entry: Entry, now: float) -> bool:
        self._offers.append(entry.nbytes)
        return super().offer(entry, now)


def test_an_admission_is_told_about_what_will_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a budget of bytes a day is one of bytes on the disk."""
    offers: list[int] = []
    monkeypatch.setattr(admissions, "load", lambda _: lambda _: Counting(offers))
    room = Room(folder, "raw", "zstd")
    room.store(room.sequence(EXACT))
    raw_bytes = room.cache.stats().tiers[0].used_bytes // CHUNKS
    assert offers == [raw_bytes] * CHUNKS
    room.store(room.sequence(replace(EXACT, tenant_salt="another")))
    stored = room.cache.stats().tiers[1].used_bytes / (2 * CHUNKS)
    assert offers[CHUNKS:] == pytest.approx([stored] * CHUNKS, rel=0.05)
    room.close()


def test_a_chunk_of_several_shards_shrinks_as_one(folder: Path) -> None:
    """All shards are rounded up to the same share, so that an index sees few sizes."""
    stored(folder)
    sizes = {path.stat().st_size for path in folder.rglob("*.kvs")}
    assert len(sizes) <= 2
    assert all(size % 4096 == 0 for size in sizes)


def test_b96_few_encoded_chunks_wait_for_a_disk(folder: Path) -> None:
    """Nothing but what is encoded ahead and written is pinned."""
    room = Room(folder, "raw", "zstd")
    for tenant in range(8):
        room.store(room.sequence(replace(EXACT, tenant_salt=str(tenant))))
    assert room.cache.stats().tiers[0].pinned_chunks == 0
    assert room.cache.stats().tiers[1].chunks == 8 * CHUNKS
    room.close()
