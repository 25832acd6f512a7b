"""A Hugging Face folder's files: its weights as safetensors, whole or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError

INDEX_NAME: Final = "model.safetensors.index.json"
CONFIG_NAME: Final = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, or raise ``ConfigError`` that names the file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights, sorted.

    Raises ``ConfigError`` without an index and exactly one ``*.safetensors`` file.
    """
    if (folder / INDEX_NAME).exists():
        return sorted(set(weight_map(folder).values()))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise ConfigError(
            f"{folder}: needs {INDEX_NAME} or exactly one *.safetensors file; found: {found}"
        )
    return names


def weight_map(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor, as the index says. Raises ``ConfigError``."""
    path = folder / INDEX_NAME
    entries = read_json(path).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path}: 'weight_map' must be an object of tensor and file names")
    for name in entries.values():
        # A model folder may come from anyone: it names files in itself and nowhere else.
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{path}: {name!r} is not the name of a file in the folder")
    return entries
