"""Tensors of a Hugging Face folder: one ``*.safetensors`` file, or shards with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvtier.errors import ConfigError
from kvtier.model_files.folder import INDEX_NAME, weight_files, weight_map
from kvtier.model_files.identity import folder_weights_id


class SafetensorsFolder:
    """Reads tensors by name. Files are mapped, not copied; the tensors keep the mapping alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: self._open(name) for name in weight_files(folder)}
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
        """Return the identity of all tensors as they are stored, and of the config beside them.

        Reads every byte the first time and remembers the result for these very files.
        """
        return folder_weights_id(self._folder)

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
        for tensor, name in weight_map(self._folder).items():
            if self._file_of.get(tensor) != name:
                raise ConfigError(
                    f"{self._folder / INDEX_NAME}: tensor {tensor!r} is not in {name!r}"
                )
