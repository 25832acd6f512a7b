"""Calibrations at rest: one per model and codec, whoever comes first; damage is absence."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.codecs import calibration_store
from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.calibration_store import CalibrationStore
from kvtier.constants import QUARANTINE_FILES_MAX
from kvtier.errors import TierFullError, TierUnavailableError
from kvtier.types import GroupKind, KVGroup, KVLayout, Namespace

GROUP = KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=4, v_dim=4, dtype="float32")
MODEL = Namespace("weights", KVLayout((GROUP,)), rope="rope")


def learned(seed: int) -> Calibration:
    mean = np.random.default_rng(seed).normal(size=(2, 2, 4)).astype(np.float32)
    return Calibration(MODEL.layout, (mean,), (Rotary((1.0, 0.5)),))


def digest(calibration: Calibration | None) -> str | None:
    return None if calibration is None else calibration.digest


def files(folder: Path, prefix: str) -> list[Path]:
    return sorted(folder.glob(f"{prefix}*"))


def test_the_first_one_offered_is_the_one(tmp_path: Path) -> None:
    first, second = CalibrationStore(tmp_path / "a" / "c"), CalibrationStore(tmp_path / "a" / "c")
    assert first.load(MODEL, "int4") is None
    assert first.offer(MODEL, "int4", learned(1)).digest == learned(1).digest
    assert second.offer(MODEL, "int4", learned(2)).digest == learned(1).digest
    assert digest(second.load(MODEL, "int4")) == learned(1).digest
    assert files(tmp_path / "a" / "c", "new-") == []


def test_each_model_and_codec_has_its_own(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    store.offer(MODEL, "int4", learned(1))
    other = replace(MODEL.layout.groups[0], kv_heads=4)
    for codec, namespace in (
        ("int5k4v-c", MODEL),
        ("int4", replace(MODEL, weights_id="others")),
        ("int4", replace(MODEL, rope="another")),
        ("int4", replace(MODEL, layout=KVLayout((other,)))),
    ):
        assert store.load(namespace, codec) is None
    # How a deployment cuts the model, and who asks, changes nothing.
    cut = replace(MODEL.layout, head_groups=2, chunk_tokens=512)
    alike = replace(MODEL, layout=cut, tenant_salt="salt", adapter_id="adapter")
    assert digest(store.load(alike, "int4")) == learned(1).digest


def test_an_old_one_is_found_by_its_id(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    assert store.find(learned(1).digest, MODEL.layout) is None
    store.offer(MODEL, "int4", learned(1))
    for digits in (16, 20, 64):
        assert digest(store.find(learned(1).digest[:digits], MODEL.layout)) == learned(1).digest
    for unknown in (learned(2).digest, learned(1).digest[:15], "", "../of-0123456789abcdef"):
        assert store.find(unknown, MODEL.layout) is None


@pytest.mark.parametrize("place", [0, 30, -1])
def test_b78_a_damaged_calibration_is_none_and_the_next_one_takes_its_place(
    tmp_path: Path, place: int
) -> None:
    store = CalibrationStore(tmp_path)
    store.offer(MODEL, "int4", learned(1))
    path = tmp_path / learned(1).digest
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    assert store.load(MODEL, "int4") is None
    assert not path.exists()
    assert len(files(tmp_path, "damaged-")) == 1
    assert store.offer(MODEL, "int4", learned(2)).digest == learned(2).digest
    assert digest(store.load(MODEL, "int4")) == learned(2).digest


@pytest.mark.parametrize("content", [b"", b"\0" * 80, b"f" * 64, b"f" * 4096], ids=len)
def test_b66_a_torn_pointer_is_none_and_replaced(tmp_path: Path, content: bytes) -> None:
    store = CalibrationStore(tmp_path)
    store.offer(MODEL, "int4", learned(1))
    (pointer,) = files(tmp_path, "of-")
    pointer.write_bytes(content)
    assert store.load(MODEL, "int4") is None
    assert store.offer(MODEL, "int4", learned(2)).digest == learned(2).digest
    assert digest(store.load(MODEL, "int4")) == learned(2).digest
    # Chunks packed with the first one are still readable.
    assert store.find(learned(1).digest, MODEL.layout) is not None


def test_a_pointer_to_nothing_is_replaced(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    store.offer(MODEL, "int4", learned(1))
    (tmp_path / learned(1).digest).unlink()
    assert store.load(MODEL, "int4") is None
    assert store.offer(MODEL, "int4", learned(1)).digest == learned(1).digest
    assert digest(store.load(MODEL, "int4")) == learned(1).digest


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CalibrationStore(tmp_path)
    monkeypatch.setattr(calibration_store, "CALIBRATIONS_MAX", 1)
    store.offer(MODEL, "int4", learned(1))
    with pytest.raises(TierFullError, match="holds 1"):
        store.offer(MODEL, "int5k4v-c", learned(2))
    monkeypatch.setattr(calibration_store, "CALIBRATION_BYTES_MAX", 10)
    with pytest.raises(TierFullError, match="10 fit"):
        store.offer(MODEL, "int4", learned(1))
    assert store.load(MODEL, "int4") is None


def test_what_was_left_behind_goes(tmp_path: Path) -> None:
    for index in range(QUARANTINE_FILES_MAX + 5):
        (tmp_path / f"damaged-{index}").touch()
        os.utime(tmp_path / f"damaged-{index}", (1e9 + index, 1e9 + index))
    (tmp_path / "new-old").touch()
    os.utime(tmp_path / "new-old", (1e9, 1e9))
    (tmp_path / "new-young").touch()
    CalibrationStore(tmp_path).offer(MODEL, "int4", learned(1))
    left = {path.name for path in files(tmp_path, "damaged-")}
    assert left == {f"damaged-{index}" for index in range(5, QUARANTINE_FILES_MAX + 5)}
    assert files(tmp_path, "new-") == [tmp_path / "new-young"]


def test_a_folder_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = CalibrationStore(tmp_path / "file" / "calibrations")
    assert store.load(MODEL, "int4") is None
    with pytest.raises(TierUnavailableError):
        store.offer(MODEL, "int4", learned(1))


CHILD = """
import sys
from pathlib import Path
from tests.unit.test_calibration_store import MODEL, CalibrationStore, learned
sys.stdout.write("ready\\n")
sys.stdout.flush()
for line in sys.stdin:
    round, seed = map(int, line.split())
    store = CalibrationStore(Path(sys.argv[1]) / str(round))
    won = store.offer(MODEL, "int4", learned(seed)).digest
    sys.stdout.write(f"{won} {store.load(MODEL, 'int4').digest}\\n")
    sys.stdout.flush()
"""


def test_b60_processes_that_race_agree(tmp_path: Path) -> None:
    """Thirty times, two processes offer at once; in every third folder lies a torn pointer."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    winners = set()
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for number in range(30):
            folder = tmp_path / str(number)
            if number % 3 == 0:
                CalibrationStore(folder).offer(MODEL, "int4", learned(9))
                (pointer,) = files(folder, "of-")
                pointer.write_bytes(b"torn")
            for seed, child in enumerate(children, 1):
                assert child.stdin is not None
                child.stdin.write(f"{number} {seed}\n")
                child.stdin.flush()
            answers = [child.stdout.readline().split() for child in children if child.stdout]
            loaded = digest(CalibrationStore(folder).load(MODEL, "int4"))
            assert {found for answer in answers for found in answer} == {loaded}
            winners.add(loaded)
    finally:
        for child in children:
            child.communicate()
    assert winners <= {learned(1).digest, learned(2).digest}
