"""Whose KV it is: names for weights and adapters that change when what they name does.

Weights in safetensors are named by their content, as the other engines name them that load the same
folder. Other files are known by name, size and time of change: copied ones are computed anew, which
costs a miss; changed ones are never taken for the old ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.model_files.identity import folder_weights_id

#: How vLLM may be told to load what then is just the tensors of the safetensors files.
_AS_STORED = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
#: Endings of files that hold no weights and change nothing that is computed.
_ASIDE = frozenset({".md", ".txt", ".png", ".jpg", ".lock", ".gitattributes"})


def weights_id(
    model: str,
    revision: str,
    load_format: str,
    config: Mapping[str, Any],
    *,
    altered: bool,
    snapshot: Callable[[str, str], Path | None],
) -> str:
    """Return a name for weights: their content's identity, or a digest of where they lie.

    ``model`` is a folder, a file or a name on a hub; ``snapshot`` finds the folder of a name, whose
    path says which commit it is. ``config`` is the model's as vLLM has it, which matters where it
    was ``altered`` from what stands in the folder, and where no content is known. Dummy weights
    follow from it alone. Reads all weights once. Raises ``ConfigError`` for weights that cannot be
    told from others.
    """
    told = json.dumps(config, sort_keys=True, default=str)
    parts = [load_format, told]
    if load_format != "dummy":
        path = Path(model)
        found = path if path.exists() else snapshot(model, revision)
        if found is None:
            raise ConfigError(
                f"the weights of {model!r} are neither in a folder nor in the hub's cache, so they "
                'cannot be told from others; name them by "weights_id" in kv_connector_extra_config'
            )
        content = _content(found) if load_format in _AS_STORED else ""
        if content:
            return f"{content} {_digest([told])}" if altered else content
        parts += [] if path.exists() else [model, found.name]
        parts += _listed(found) if path.exists() else []
    return _digest(parts)


def is_altered(model_config: Any) -> bool:
    """Tell whether vLLM computes something else than what a folder's files say."""
    told = ("quantization", "hf_overrides", "hf_config_path")
    return any(getattr(model_config, name, None) for name in told)


def adapter_id(name: str, path: str) -> str:
    """Return a name for a LoRA adapter, and for the files it has now if they lie here."""
    folder = Path(path)
    listed = _listed(folder) if path and folder.exists() else [path]
    return f"{name}:{_digest(listed)}"


def inputs_id(items: list[tuple[str, int, int]]) -> str:
    """Return a name for the images and sounds of a prompt: identifier, first token and length."""
    if not items:
        return ""
    text = json.dumps(sorted(items, key=lambda item: item[1]))
    return f"inputs:{hashlib.sha256(text.encode()).hexdigest()}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _content(folder: Path) -> str:
    """Return the identity of a folder's safetensors; an empty text where it holds no such model."""
    try:
        return folder_weights_id(folder) if folder.is_dir() else ""
    except ConfigError:
        return ""


def _listed(path: Path) -> list[str]:
    """Name, size and time of change of a file or of a folder's files."""
    inside = [path] if path.is_file() else sorted(path.rglob("*"))
    listed = []
    for each in inside:
        if each.is_file() and each.suffix not in _ASIDE:
            status = each.stat()
            name = each.name if each == path else str(each.relative_to(path))
            listed.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return listed
