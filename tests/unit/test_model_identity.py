"""A model's folder has one identity, whoever loads it and wherever it lies."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvtier.errors import ConfigError
from kvtier.keys import weights_id
from kvtier.model_files.folder import INDEX_NAME
from kvtier.model_files.identity import folder_weights_id

CONFIG = {"model_type": "llama", "rms_norm_eps": 1e-5, "_name_or_path": "a/b", "dtype": "bfloat16"}
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, one of them empty."""
    made = {name: torch.arange(12).view(3, 4).to(getattr(torch, name)) for name in DTYPES}
    return made | {"empty": torch.zeros(0, 4)}


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def test_the_identity_is_that_of_all_tensors_and_of_the_config(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    told = b'{"model_type":"llama","rms_norm_eps":1e-05}'
    expected = weights_id(
        [
            ("config.json", "json", (), hashlib.sha256(told).digest()),
            *(
                (
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    tuple(tensor.shape),
                    hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest(),
                )
                for name, tensor in tensors.items()
            ),
        ]
    )
    assert folder_weights_id(write(tmp_path / "model", tensors)) == expected


def test_it_is_the_same_wherever_the_files_lie_and_however_they_are_cut(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    whole = write(tmp_path / "model", tensors)
    first = folder_weights_id(whole)
    shutil.copytree(whole, tmp_path / "copy")
    assert folder_weights_id(tmp_path / "copy") == first
    cut = write(tmp_path / "cut", tensors, _name_or_path="c/d", transformers_version="9")
    (cut / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, cut / file)
    (cut / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    assert folder_weights_id(cut) == first


def test_what_is_computed_from_them_matters(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    found = {
        folder_weights_id(write(tmp_path / "a", tensors)),
        folder_weights_id(write(tmp_path / "b", tensors, rms_norm_eps=1e-6)),
        folder_weights_id(write(tmp_path / "c", tensors, attention_multiplier=2)),
        folder_weights_id(write(tmp_path / "d", tensors | {"int8": tensors["uint8"].clone()})),
        folder_weights_id(write(tmp_path / "e", tensors | {"int8": tensors["int8"].flip(0)})),
    }
    assert len(found) == 5


def test_files_are_read_once(
    tmp_path: Path, own_cache: Path, tensors: dict[str, torch.Tensor]
) -> None:
    folder = write(tmp_path / "model", tensors)
    folder_weights_id(folder)
    (kept,) = (own_cache / "weights_ids").iterdir()
    (kept / "id").write_text("remembered")
    assert folder_weights_id(folder) == "remembered"


def test_where_nothing_can_be_remembered_it_is_found_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]
) -> None:
    folder = write(tmp_path / "model", tensors)
    first = folder_weights_id(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert folder_weights_id(folder) == first


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"12345678",
        (1 << 60).to_bytes(8, "little") + b"{}",
        header("{not json"),
        header("[]"),
        header('{"a": 1}'),
        header('{"a": {"dtype": "F32", "shape": [1]}}'),
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}') + b"1234",
    ],
    ids=repr,
)
def test_files_that_are_not_whole_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        folder_weights_id(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "exactly one"),
        (lambda folder: (folder / "config.json").write_text("["), "not JSON"),
    ],
)
def test_folders_that_are_not_whole_are_refused(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    spoil: Callable[[Path], object],
    said: str,
) -> None:
    folder = write(tmp_path / "model", tensors)
    spoil(folder)
    with pytest.raises(ConfigError, match=said):
        folder_weights_id(folder)
