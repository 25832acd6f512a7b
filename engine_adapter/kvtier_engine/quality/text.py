"""The text that codecs are measured on: the user's, or a book that ships with the project."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from kvtier.constants import MIB
from kvtier.errors import ConfigError

#: The text that ships; where it is from stands in ``data/SOURCES.md``.
DEFAULT_NAME: Final = "opticks.txt"
TEXT_BYTES_MAX: Final = 16 * MIB


def read_text(path: Path | None) -> tuple[str, str]:
    """Return a text's name and content: the shipped one for None.

    Raises ``ConfigError`` for a file that cannot be read, is too large or is not UTF-8.
    """
    if path is None:
        shipped = files("kvtier_engine.quality").joinpath("data", DEFAULT_NAME)
        return DEFAULT_NAME, shipped.read_text(encoding="utf-8")
    try:
        with path.open("rb") as file:
            content = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror or error}") from error
    if len(content) > TEXT_BYTES_MAX:
        raise ConfigError(f"--text {path}: more than {TEXT_BYTES_MAX} bytes; give a part of it")
    try:
        return path.name, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path}: not UTF-8 at byte {error.start}") from error
