"""Whose KV it is: names for weights and adapters that change when what they name does.

The scheduler's process has no weights to digest, so files are known by name, size and time of
change: copied weights are computed anew, which costs a miss; changed ones are never taken for the
old ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

#: Endings of files that hold no weights and change nothing that is computed.
_ASIDE = frozenset({".md", ".txt", ".png", ".jpg", ".lock", ".gitattributes"})


def weights_id(
    model: str,
    revision: str,
    load_format: str,
    config: Mapping[str, Any],
    *,
    snapshot: Callable[[str, str], Path | None],
) -> str:
    """Return a name for weights: a digest of where they lie and of the model's own config.

    ``model`` is a folder, a file or a name on a hub; ``snapshot`` finds the folder of a name, whose
    path says which commit it is. Dummy weights follow from the config. Raises ``ConfigError`` for
    weights that cannot be told from others.
    """
    parts = [load_format, json.dumps(config, sort_keys=True, default=str)]
    if load_format != "dummy":
        path = Path(model)
        found = path if path.exists() else snapshot(model, revision)
        if found is None:
            raise ConfigError(
                f"the weights of {model!r} are neither in a folder nor in the hub's cache, so they "
                'cannot be told from others; name them by "weights_id" in kv_connector_extra_config'
            )
        parts += [] if path.exists() else [model, found.name]
        parts += _listed(found) if path.exists() else []
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def adapter_id(name: str, path: str) -> str:
    """Return a name for a LoRA adapter, and for the files it has now if they lie here."""
    folder = Path(path)
    listed = _listed(folder) if path and folder.exists() else [path]
    return f"{name}:{hashlib.sha256(chr(0).join(listed).encode()).hexdigest()}"


def inputs_id(items: list[tuple[str, int, int]]) -> str:
    """Return a name for the images and sounds of a prompt: identifier, first token and length."""
    if not items:
        return ""
    text = json.dumps(sorted(items, key=lambda item: item[1]))
    return f"inputs:{hashlib.sha256(text.encode()).hexdigest()}"


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
