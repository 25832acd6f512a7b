"""From names to codecs that can be measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.codecs.calibration import CALIBRATION_BYTES_MAX, Calibration, parse_calibration
from kvtier.codecs.centred import CENTRED
from kvtier.errors import ConfigError, FormatError, KVTierError
from kvtier.interfaces import BlockCodec
from kvtier.registry import codecs
from kvtier.types import KVLayout
from kvtier_engine.quality.results import Skipped

#: What asks for every installed codec.
ALL: Final = "all"


def read_calibration(path: Path, layout: KVLayout) -> Calibration:
    """Read the file that ``kvtier calibrate --output`` wrote.

    Raises ``ConfigError`` for one that cannot be read, is damaged or is another model's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(CALIBRATION_BYTES_MAX + 1)
        return parse_calibration(data, layout)
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror or error}") from error
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"--calibration {path}: {error}") from error


def build_codec(name: str, calibration: Calibration | None = None) -> BlockCodec:
    """Make the codec of that name.

    Raises ``RegistryError`` for an unknown one and ``ConfigError`` for one that needs a
    calibration and has none.
    """
    factory = codecs.load(name)
    centred = name in CENTRED and calibration is not None
    codec: BlockCodec = factory(calibration) if centred else factory()
    return codec


def wanted_names(text: str) -> list[str]:
    """Return the names that ``text`` lists by comma, or those of all installed codecs.

    Raises ``RegistryError`` for an unknown one and ``ConfigError`` for none.
    """
    installed = codecs.names()
    if text.strip() == ALL:
        return installed
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--codec {text!r}; allowed: {ALL}, {', '.join(installed)}")
    for name in names:
        codecs.load(name)
    return names


def build_codecs(
    names: Sequence[str], calibration: Calibration | None, *, strict: bool
) -> tuple[list[BlockCodec], list[Skipped]]:
    """Make codecs. One that cannot be made is an error if ``strict``, else skipped."""
    made: list[BlockCodec] = []
    skipped: list[Skipped] = []
    for name in names:
        try:
            made.append(build_codec(name, calibration))
        except KVTierError as error:
            if strict:
                raise
            skipped.append(Skipped(name, str(error)))
    return made, skipped
