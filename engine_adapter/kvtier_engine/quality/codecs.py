"""From names to codecs that can be measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.errors import ConfigError, KVTierError
from kvtier.interfaces import BlockCodec
from kvtier.registry import codecs
from kvtier_engine.quality.results import Skipped

#: What asks for every installed codec.
ALL: Final = "all"


def build_codec(name: str) -> BlockCodec:
    """Make the codec of that name.

    Raises ``RegistryError`` for an unknown one and ``ConfigError`` for one that needs what it
    does not get here, a calibration.
    """
    codec: BlockCodec = codecs.load(name)()
    return codec


def choose_codecs(text: str, names: Sequence[str]) -> tuple[list[BlockCodec], list[Skipped]]:
    """Make the codecs that ``text`` names by comma, or all of ``names`` that can be made.

    Raises what ``build_codec`` raises for a codec that was asked for by its name, and
    ``ConfigError`` where none was.
    """
    if text.strip() != ALL:
        wanted = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
        if not wanted:
            raise ConfigError(f"--codec {text!r}; allowed: {ALL}, {', '.join(names)}")
        return [build_codec(name) for name in wanted], []
    made: list[BlockCodec] = []
    skipped: list[Skipped] = []
    for name in names:
        try:
            made.append(build_codec(name))
        except KVTierError as error:
            skipped.append(Skipped(name, str(error)))
    return made, skipped
