"""Small files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError


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
