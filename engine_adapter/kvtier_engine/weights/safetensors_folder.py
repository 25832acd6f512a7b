"""Tensors of a Hugging Face folder: one ``*.safetensors`` file, or shards with an index."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvtier.errors import ConfigError
from kvtier.keys import weights_id
from kvtier_engine.weights.cache import cached_folder, file_identity
from kvtier_engine.weights.files import read_json

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsFolder:
    """Reads tensors by name. Files are mapped, not copied; the tensors keep the mapping alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: self._open(name) for name in self._file_names()}
        self._file_of = {
            tensor: name
            for name, file in self._files.items()
            # Not a mapping: the handle has keys() and cannot be iterated.
            for tensor in file.keys()  # noqa: SIM118
        }
        self._check_index()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a stored tensor; ``ConfigError`` when it is missing or has another shape."""
        if name not in self._file_of:
            raise ConfigError(f"{self._folder}: tensor {name!r} is missing")
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._folder}: tensor {name!r} has shape {tuple(tensor.shape)}; "
                f"config.json says {shape}"
            )
        return tensor

    def weights_id(self) -> str:
        """Return the identity of all tensors as they are stored.

        Reads every byte the first time and remembers the result for these very files.
        """
        paths = [self._folder / name for name in sorted(self._files)]
        name = file_identity(paths, "weights id 1")
        folder = cached_folder(f"weights_ids/{name}", self._write_id)
        return (folder / "id").read_text(encoding="ascii")

    def _write_id(self, folder: Path) -> None:
        rows = []
        for name in sorted(self._file_of):
            tensor = self._files[self._file_of[name]].get_tensor(name)
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((name, dtype, tuple(tensor.shape), hashlib.sha256(data).digest()))
        (folder / "id").write_text(weights_id(rows), encoding="ascii")

    def _file_names(self) -> list[str]:
        index = self._folder / INDEX_NAME
        if index.exists():
            return sorted(set(self._weight_map().values()))
        names = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if len(names) != 1:
            found = ", ".join(names) or "none"
            raise ConfigError(
                f"{self._folder}: needs {INDEX_NAME} or exactly one *.safetensors file; "
                f"found: {found}"
            )
        return names

    def _weight_map(self) -> Mapping[str, str]:
        path = self._folder / INDEX_NAME
        entries = read_json(path).get("weight_map")
        if not isinstance(entries, dict) or not entries:
            raise ConfigError(f"{path}: 'weight_map' must be an object of tensor and file names")
        for name in entries.values():
            # A model folder may come from anyone: it names files in itself and nowhere else.
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(f"{path}: {name!r} is not the name of a file in the folder")
        return entries

    def _open(self, name: str) -> Any:
        path = self._folder / name
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except SafetensorError as error:
            raise ConfigError(f"{path}: not a whole safetensors file: {error}") from error

    def _check_index(self) -> None:
        if not (self._folder / INDEX_NAME).exists():
            return
        for tensor, name in self._weight_map().items():
            if self._file_of.get(tensor) != name:
                raise ConfigError(
                    f"{self._folder / INDEX_NAME}: tensor {tensor!r} is not in {name!r}"
                )
