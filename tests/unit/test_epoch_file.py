"""Epochs on disk: replaced whole, and never believed when damaged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvtier.cache.tenancy.epochs import Epochs
from kvtier.tiers.disk.epoch_file import load_epochs, save_epochs
from kvtier.tiers.epoch_record import StoredEpochs

A, B = b"a" * 32, b"b" * 32


def test_without_a_file_nothing_was_ever_raised(tmp_path: Path) -> None:
    assert load_epochs(str(tmp_path)) == StoredEpochs({}, 0)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_epochs(str(tmp_path), {A: 3, B: 2**40}, 17)
    assert load_epochs(str(tmp_path)) == StoredEpochs({A: 3, B: 2**40}, 17)
    save_epochs(str(tmp_path), {A: 4}, 17)
    assert load_epochs(str(tmp_path)) == StoredEpochs({A: 4}, 17)
    assert [path.name for path in tmp_path.iterdir()] == ["epochs"]


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_epochs(str(tmp_path), {A: 1}, 0)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space"):
                save_epochs(str(tmp_path), {A: 2}, 0)
        assert load_epochs(str(tmp_path)) == StoredEpochs({A: 1}, 0)
    save_epochs(str(tmp_path), {A: 3}, 0)
    assert load_epochs(str(tmp_path)) == StoredEpochs({A: 3}, 0)


@pytest.mark.parametrize("way", ["flip", "cut", "empty", "zeros", "longer"])
def test_a_damaged_file_raises_the_floor_under_everything(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_epochs(str(tmp_path), {A: 3, B: 7}, 0)
    file = tmp_path / "epochs"
    data = bytearray(file.read_bytes())
    if way == "flip":
        data[-1] ^= 1
    file.write_bytes(
        {
            "flip": bytes(data),
            "cut": bytes(data[:-1]),
            "empty": b"",
            "zeros": bytes(len(data)),
            "longer": bytes(data) + b"\0",
        }[way]
    )
    monkeypatch.setattr(time, "time", lambda: 1_900_000_000.7)
    stored = load_epochs(str(tmp_path))
    assert stored == StoredEpochs({}, 1_900_000_000, damaged=True)
    epochs = Epochs()
    epochs.merge(0, stored.epochs, stored.floor)
    for namespace, old in ((A, 3), (B, 7)):
        assert epochs.get(namespace) > old
    # Saved, the floor stays where it is: what is stored from now on outlives the next restart.
    snapshot = epochs.snapshot()
    save_epochs(str(tmp_path), snapshot.epochs, snapshot.floor)
    monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
    assert load_epochs(str(tmp_path)) == StoredEpochs({}, 1_900_000_000)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_epochs(str(tmp_path), {A: 3}, 1)
    file = tmp_path / "epochs"
    sound = file.read_bytes()
    for bit in range(len(sound) * 8):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        stored = load_epochs(str(tmp_path))
        assert stored.damaged
        assert stored.epochs == {}
        assert stored.floor > 1_000_000_000


def test_what_cannot_be_read_is_an_error_and_no_zero(tmp_path: Path) -> None:
    (tmp_path / "epochs").mkdir()
    with pytest.raises(OSError, match="directory"):
        load_epochs(str(tmp_path))
