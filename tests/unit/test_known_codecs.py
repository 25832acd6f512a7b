"""Which codec packs for a name, why another one stands in, and where calibrations are found."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.cache.worker import CacheWorker
from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.calibration_copies import CalibrationCopies
from kvtier.codecs.calibration_store import CalibrationStore
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.known import KnownCodecs
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.testing.engine_double import wait_until
from kvtier.types import Fidelity, KVLayout, Namespace, Part, Placement
from kvtier_kernels.rotated import reference
from tests.lib.codec_room import CHUNK, CHUNKS, GROUP, LAYOUT, Room

ROPE = "kind=default;layout=half;dim=64;theta=10000.0"
MODEL = Namespace("weights", LAYOUT, rope=ROPE, fidelity=Fidelity.LOSSY)


def learned(seed: int, weak_layers: tuple[int, ...] = ()) -> Calibration:
    mean = np.random.default_rng(seed).normal(size=(3, 2, 64)).astype(np.float32)
    rotary = Rotary(tuple(10000.0 ** (-i / 32) for i in range(32)))
    return Calibration(LAYOUT, (mean,), (rotary,), weak_layers)


def stored_in(folder: Path) -> list[str]:
    return sorted(path.name[:16] for path in (folder / "calibrations").glob("[0-9a-f]*"))


# Copies


def test_every_directory_has_a_copy_and_losing_one_loses_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    copies = CalibrationCopies(folders)
    assert copies.load(MODEL, "int4") is None
    assert copies.offer(MODEL, "int4", learned(1)).digest == learned(1).digest
    assert copies.offer(MODEL, "int4", learned(2)).digest == learned(1).digest, "there was one"
    assert all(stored_in(folder) == [learned(1).digest[:16]] for folder in folders)
    for lost in folders[:2]:
        shutil.rmtree(lost)
        found = copies.load(MODEL, "int4")
        assert found is not None
        assert found.digest == learned(1).digest
        assert copies.find(found.digest[:16], LAYOUT) is not None
        assert [each.digest for each in copies.every(LAYOUT)] == [found.digest]


def test_a_directory_that_cannot_be_written_keeps_no_other_from_a_copy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    copies = CalibrationCopies([tmp_path / "file", tmp_path / "b"])
    assert copies.offer(MODEL, "int4", learned(1)).digest == learned(1).digest
    assert stored_in(tmp_path / "b") == [learned(1).digest[:16]]
    with pytest.raises(TierUnavailableError):
        CalibrationCopies([tmp_path / "file"]).offer(MODEL, "int4", learned(1))


def test_where_directories_differ_the_first_one_counts(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        CalibrationStore(tmp_path / name / "calibrations").offer(MODEL, "int4", learned(seed))
    copies = CalibrationCopies([tmp_path / "b", tmp_path / "a"])
    assert copies.offer(MODEL, "int4", learned(3)).digest == learned(2).digest
    assert {each.digest for each in copies.every(LAYOUT)} == {
        learned(1).digest,
        learned(2).digest,
    }


def test_a_damaged_copy_is_read_from_elsewhere(tmp_path: Path) -> None:
    copies = CalibrationCopies([tmp_path / "a", tmp_path / "b"])
    copies.offer(MODEL, "int4", learned(1))
    path = tmp_path / "a" / "calibrations" / learned(1).digest
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    found = copies.find(learned(1).digest, LAYOUT)
    assert found is not None
    assert found.digest == learned(1).digest


# Codecs by name


def test_what_any_calibration_packed_can_be_read(tmp_path: Path) -> None:
    """One whose pointer is gone, and one of a copied directory."""
    copies = CalibrationCopies([tmp_path])
    copies.offer(MODEL, "int4", learned(1))
    copies.offer(replace(MODEL, weights_id="others"), "int4", learned(2))
    known = KnownCodecs(copies)
    names = [
        f"{codec}.{learned(seed).digest[:16]}" for codec in ("int4", "int5k4v-c") for seed in (1, 2)
    ]
    assert not any(known.readable(name, Fidelity.LOSSY) for name in names), "nothing is read yet"
    assert known.find(MODEL, ["int4"]) == []
    assert known.packing("int4", MODEL) == names[0]
    assert all(known.readable(name, Fidelity.LOSSY) for name in names)
    assert not known.readable("int4.0123456789abcdef", Fidelity.LOSSY)
    with pytest.raises(ConfigError, match="not known here"):
        known.get("int4.0123456789abcdef")


def test_a_calibration_that_comes_later_is_found_by_its_name(tmp_path: Path) -> None:
    """A rank in a process of its own learns of it when it is told to unpack with it."""
    rank = KnownCodecs(CalibrationCopies([tmp_path]))
    assert rank.find(MODEL, ["int4"]) == ["int4"]
    CalibrationCopies([tmp_path]).offer(MODEL, "int4", learned(1))
    name = f"int4.{learned(1).digest[:16]}"
    assert rank.get(name).name == name


def test_a_new_directory_gets_its_copy_at_the_next_start(tmp_path: Path) -> None:
    CalibrationCopies([tmp_path / "a"]).offer(MODEL, "int4", learned(1))
    both = KnownCodecs(CalibrationCopies([tmp_path / "a", tmp_path / "b"]))
    both.prepare(MODEL, ["int4"])
    assert stored_in(tmp_path / "b") == [learned(1).digest[:16]]


# Fallbacks


def test_fallbacks_are_counted_by_reason(tmp_path: Path) -> None:
    known = KnownCodecs(CalibrationCopies([tmp_path]))
    known.note_packed("int4", MODEL, 2)
    known.prepare(MODEL, ["int4", "int8"])
    known.note_packed("int4", MODEL, 3)
    known.note_packed("int8", MODEL, 5)
    strange = replace(MODEL, rope="kind=strange")
    known.prepare(strange, ["int4"])
    known.note_packed("int4", strange, 7)
    weak = replace(MODEL, weights_id="weak")
    CalibrationCopies([tmp_path]).offer(weak, "int4", learned(1, (0, 2)))
    known.prepare(weak, ["int4"])
    known.note_packed("int4", weak, 11)
    assert known.fallbacks == {
        ("int4", "absent"): 2,
        ("int4", "learning"): 3,
        ("int4", "rope"): 7,
        ("int4", "weak"): 11,
    }


def test_a_model_with_weak_layers_is_packed_as_int6(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CalibrationCopies([tmp_path]).offer(MODEL, "int4", learned(1, (0, 2)))
    known = KnownCodecs(CalibrationCopies([tmp_path]))
    known.prepare(MODEL, ["int4"])
    assert known.packing("int4", MODEL) == "int6"
    assert "int4 would lose too much in layers 0, 2: int6 packs" in caplog.text
    assert known.readable(f"int4.{learned(1, (0, 2)).digest[:16]}", Fidelity.LOSSY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibrator.__init__, "__kwdefaults__", {"tokens": 32})


@pytest.fixture
def room(tmp_path: Path, quick: None) -> Iterator[Room]:
    room = Room(tmp_path, "int4", directories=2)
    room.cache.prepare(MODEL)
    yield room
    room.close()


def test_a_layer_that_breaks_gaussianity_makes_it_int6(room: Room, tmp_path: Path) -> None:
    """Learned from traffic, kept with the calibration, and the same after a restart."""
    view = room.computed.layer_view(0, 1, Part.V)
    rows = torch.randn((view.numel() // 64, 64), generator=torch.Generator().manual_seed(1)) * 0.3
    rows[:, 7] += 8.0
    view.copy_(reference.unrotate(rows.t().contiguous()).t().reshape(view.shape))
    assert room.store(room.sequence(MODEL))
    wait_until(lambda: room.cache.codecs.packing("int4", MODEL) == "int6", "a decision")
    assert room.cache.stats().codec_fallbacks == {("int4", "learning"): CHUNKS}
    other = replace(MODEL, tenant_salt="another")
    assert room.store(room.sequence(other))
    assert room.cache.stats().codec_fallbacks["int4", "weak"] == CHUNKS
    outcome = room.load(room.sequence(other))
    assert outcome is not None
    assert outcome.end_token == CHUNKS * CHUNK
    later = KnownCodecs(CalibrationCopies([tmp_path / "disk1"]))
    later.prepare(MODEL, ["int4"])
    assert later.packing("int4", MODEL) == "int6"


class Slow(CalibrationCopies):
    """A store whose disk takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])
        self.go_on = threading.Event()
        self.writer = ""

    def offer(self, namespace: Namespace, codec: str, calibration: Calibration) -> Calibration:
        self.writer = threading.current_thread().name
        assert self.go_on.wait(10)
        return super().offer(namespace, codec, calibration)


def test_what_was_learned_is_written_by_a_thread_of_its_own(tmp_path: Path, quick: None) -> None:
    """The copies go on meanwhile."""
    room = Room(tmp_path, "int8")
    slow = Slow(tmp_path)
    known = KnownCodecs(slow)
    known.prepare(MODEL, ["int4"])
    worker = CacheWorker(Placement(), room.cache.arena, codecs=known)
    room.worker.close()
    room.worker = worker
    assert room.store(room.sequence(MODEL)), "the copies are done"
    wait_until(lambda: bool(slow.writer), "an offer")
    assert slow.writer == "kvtier-calibration"
    assert known.packing("int4", MODEL) == "int5k4v"
    slow.go_on.set()
    known.close()
    assert known.packing("int4", MODEL).startswith("int4.")
    room.close()


def test_a_rank_in_another_process_reads_what_there_is(tmp_path: Path, quick: None) -> None:
    """Its codecs are its own; the arena and the directories are what it shares."""
    CalibrationCopies([tmp_path / "disk"]).offer(MODEL, "int4", learned(1))
    room = Room(tmp_path, "int4")
    room.cache.prepare(MODEL)
    rank = KnownCodecs(CalibrationCopies([tmp_path / "disk"]))
    rank.find(MODEL, ["int4"])
    room.worker.close()
    room.worker = CacheWorker(Placement(), room.cache.arena, codecs=rank)
    assert room.store(room.sequence(MODEL))
    outcome = room.load(room.sequence(MODEL))
    assert outcome is not None
    assert outcome.end_token == CHUNKS * CHUNK
    assert room.cache.stats().codec_fallbacks == {}
    room.close()


def test_layouts_of_other_models_are_passed_over(tmp_path: Path) -> None:
    CalibrationCopies([tmp_path]).offer(MODEL, "int4", learned(1))
    other = KVLayout((replace(GROUP, kv_heads=4),), chunk_tokens=CHUNK)
    assert CalibrationCopies([tmp_path]).every(other) == []
