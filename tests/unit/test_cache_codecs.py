"""Tiers of several codecs: what packed a chunk unpacks it, and nothing is quantised twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier.cache.sequence import Sequence
from kvtier.codecs.calibrator import Calibrator
from kvtier.errors import ConfigError, RegistryError
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Verifier
from kvtier.types import (
    Fidelity,
    MissReason,
    Namespace,
    Tier,
)
from tests.lib.codec_room import CHUNK, CHUNKS, EXACT, LAYOUT, LOSSY, Room, bytes_below


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory whose shards are all sound in the end."""
    yield tmp_path
    verifier = Verifier([str(tmp_path / "disk")], LocalFiles())
    list(verifier.run())
    assert verifier.verdict.findings == ()


@pytest.mark.parametrize(
    ("codec", "error_max"),
    [("raw", 0.0), ("lossless", 0.0), ("int8", 0.05), ("fp8", 0.3), ("int5k4v", 1.0)],
)
@pytest.mark.parametrize("disk_codec", [None, "zstd"])
def test_every_codec_serves_from_both_tiers_and_after_a_restart(
    folder: Path, codec: str, error_max: float, disk_codec: str | None
) -> None:
    namespace = EXACT if error_max == 0 else LOSSY
    room = Room(folder, codec, disk_codec)
    assert room.store(room.sequence(namespace))
    for tier in (Tier.DRAM, Tier.DISK):
        if tier is Tier.DISK:
            room.close()
            room = Room(folder, codec, disk_codec)
        outcome = room.load(room.sequence(namespace))
        assert outcome is not None
        assert outcome.tokens_by_tier == {tier: CHUNKS * CHUNK}
        assert room.error() <= error_max
    room.close()


def test_a_dense_codec_takes_less_of_every_medium(tmp_path: Path) -> None:
    sizes = {}
    for codec in ("raw", "int8", "int5k4v"):
        room = Room(tmp_path / codec, codec)
        room.store(room.sequence(LOSSY))
        dram = room.cache.stats().tiers[0].used_bytes
        sizes[codec] = (dram, bytes_below(tmp_path / codec))
        room.close()
    for dense, share in (("int8", 0.5), ("int5k4v", 0.4)):
        for ours, raw in zip(sizes[dense], sizes["raw"], strict=True):
            assert ours < share * raw


def test_what_an_earlier_run_packed_otherwise_is_read_as_it_is(folder: Path) -> None:
    room = Room(folder, "int8")
    room.store(room.sequence(LOSSY))
    room.close()
    room = Room(folder, "int5k4v")
    before = bytes_below(folder)
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.end_token == CHUNKS * CHUNK
    assert room.error() <= 0.05, "as int8 has it, not as int5k4v would"
    assert not room.store(room.sequence(LOSSY)), "it is held"
    assert bytes_below(folder) == before
    room.close()


def test_disk_packs_with_its_own_codec_from_the_pool(folder: Path) -> None:
    """DRAM answers as int8; after a restart the disk answers as int5k4v."""
    room = Room(folder, "int8", "int5k4v")
    assert room.store(room.sequence(LOSSY))
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.tokens_by_tier == {Tier.DRAM: CHUNKS * CHUNK}
    fine = room.error()
    stats = room.cache.stats().tiers
    assert (stats[0].chunks, stats[1].chunks) == (CHUNKS, CHUNKS), "nothing is staged any more"
    assert stats[0].pinned_chunks == 0
    room.close()
    room = Room(folder, "int8", "int5k4v")
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.tokens_by_tier == {Tier.DISK: CHUNKS * CHUNK}
    assert fine <= 0.05 < room.error() <= 1.0
    room.close()


def test_few_chunks_are_staged_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STAGED_CHUNKS_MAX: the others go to disk as DRAM has them."""
    monkeypatch.setattr("kvtier.cache.below.writeout.STAGED_CHUNKS_MAX", 0)
    room = Room(folder, "int8", "int5k4v")
    assert room.store(room.sequence(LOSSY))
    room.close()
    room = Room(folder, "int8", "int5k4v")
    outcome = room.load(room.sequence(LOSSY))
    assert outcome is not None
    assert outcome.tokens_by_tier == {Tier.DISK: CHUNKS * CHUNK}
    assert room.error() <= 0.05
    room.close()


def test_nothing_lossy_enters_an_exact_namespace(folder: Path) -> None:
    for codec, disk_codec in (("int8", None), ("raw", "int8")):
        room = Room(folder, codec, disk_codec)
        with pytest.raises(ConfigError, match=r"'int8' is lossy.*'exact'.*'lossy'"):
            room.sequence(EXACT)
        room.close()


def test_a_lossy_chunk_is_a_miss_to_an_exact_reader(folder: Path) -> None:
    """Namespaces keep them apart already; a chunk under the wrong one is not used either."""
    room = Room(folder, "int8")
    room.store(room.sequence(LOSSY))
    forged = room.sequence(LOSSY)
    honest = Sequence(EXACT, forged.root)
    honest.append(range(CHUNKS * CHUNK))
    assert honest.chunk_keys == forged.chunk_keys
    from kvtier.codecs.known import KnownCodecs

    known = KnownCodecs()
    assert known.readable("int8", Fidelity.LOSSY)
    assert not known.readable("int8", Fidelity.EXACT)
    assert known.readable("lossless", Fidelity.EXACT)
    assert not known.readable("of a later version", Fidelity.LOSSY)
    room.close()


def test_what_came_back_lossy_is_never_packed_again(tmp_path: Path) -> None:
    room = Room(tmp_path, "int8")
    sequence = room.sequence(LOSSY)
    room.store(sequence)
    assert room.load(sequence) is not None
    assert sequence.lossy_chunks == CHUNKS
    other = Room(tmp_path / "other", "int8")  # Where nothing is held any more.
    again = other.sequence(LOSSY)
    again.lossy_chunks = 2
    assert other.store(again, room.restored)
    assert other.cache.stats().tiers[0].chunks == CHUNKS - 2
    other.close()
    room.close()


def test_exact_codecs_mark_nothing(folder: Path) -> None:
    room = Room(folder, "raw")
    sequence = room.sequence(EXACT)
    room.store(sequence)
    assert room.load(sequence) is not None
    assert sequence.lossy_chunks == 0
    room.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_b147_values_that_a_codec_cannot_carry_are_not_stored(tmp_path: Path, bad: float) -> None:
    room = Room(tmp_path, "int8")
    room.views(room.computed)[2][3, 5, 1, 7] = bad
    sequence = room.sequence(LOSSY)
    assert room.store(sequence)
    stats = room.cache.stats().tiers[0]
    assert (stats.chunks, stats.used_bytes) == (0, 0)
    assert stats.counters.refused_chunks[MissReason.CODEC] == CHUNKS
    room.close()


ROPE = "kind=default;layout=half;dim=64;theta=10000.0"
TURNED = Namespace("weights", LAYOUT, rope=ROPE, fidelity=Fidelity.LOSSY)


def calibrated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A cache that has learned from the first chunks that it stored, of 92 tokens but the sinks."""
    monkeypatch.setattr(Calibrator.__init__, "__kwdefaults__", {"tokens": 32})
    room = Room(folder, "int4")
    room.cache.prepare(TURNED)
    assert room.cache.codecs.packing("int4", TURNED) == "int5k4v"
    assert room.store(room.sequence(TURNED))
    wait_until(lambda: room.cache.codecs.packing("int4", TURNED) != "int5k4v", "a calibration")
    return room


def test_a_centred_codec_learns_and_then_serves_everywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = calibrated(folder, monkeypatch)
    name = room.cache.codecs.packing("int4", TURNED)
    assert name.startswith("int4.")
    later = replace(TURNED, tenant_salt="another tenant")
    assert room.cache.codecs.packing("int4", later) == name, "the model's, whoever uses it"
    assert room.store(room.sequence(later))
    outcome = room.load(room.sequence(later))
    assert outcome is not None
    assert outcome.end_token == CHUNKS * CHUNK
    assert room.error() <= 1.0
    sinks = [view[0, :4] for view in room.views(room.restored)]
    exact = [view[0, :4] for view in room.views(room.computed)]
    assert all(map(torch.equal, sinks, exact)), "the first tokens are kept exactly"
    room.close()
    room = Room(folder, "int4")  # Both kinds of chunks are there, and the calibration.
    room.cache.prepare(TURNED)
    assert room.cache.codecs.packing("int4", TURNED) == name
    for namespace in (TURNED, later):
        outcome = room.load(room.sequence(namespace))
        assert outcome is not None
        assert outcome.tokens_by_tier == {Tier.DISK: CHUNKS * CHUNK}
        assert room.error() <= 1.0
    room.close()


def test_an_unknown_calibration_is_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = calibrated(folder, monkeypatch)
    later = replace(TURNED, tenant_salt="another tenant")
    room.store(room.sequence(later))
    room.close()
    shutil.rmtree(folder / "disk" / "calibrations")
    room = Room(folder, "int4")
    room.cache.prepare(TURNED)
    assert room.load(room.sequence(later)) is None
    assert room.load(room.sequence(TURNED)) is not None, "int5k4v needs none"
    room.close()


def test_what_cannot_be_turned_back_stays_uncalibrated(tmp_path: Path) -> None:
    room = Room(tmp_path, "int4")
    strange = replace(TURNED, rope="kind=strange")
    room.cache.prepare(strange)
    assert room.store(room.sequence(strange))
    assert room.cache.codecs.packing("int4", strange) == "int5k4v"
    room.close()


def test_an_unknown_codec_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="int8"):
        Room(tmp_path, "int9")
    with pytest.raises(RegistryError, match="int8"):
        Room(tmp_path, "raw", "int88")
