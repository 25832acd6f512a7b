"""What a setting may be, whoever builds the configuration, and a sentence where it is not so."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from kvtier.errors import ConfigError, shortly
from kvtier.types import Placement

#: What a system call takes, and JSON's readers, and no disk has.
SIZE_BYTES_MAX: Final = 2**63 - 1
_WORDS: Final = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def check_types(config: object, where: str = "") -> None:
    """Require of each field what it is declared to be: a text in place of a number goes far."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        # There may be a password in a URL.
        shown = "(hidden)" if name == "url" else value
        require(_is_a(hint, value), f"{where}{name}", shown, _word(hint))


def _is_a(hint: Any, value: object) -> bool:
    if isinstance(hint, UnionType):
        return any(_is_a(arm, value) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return isinstance(value, tuple) and all(_is_a(inner, item) for item in value)
    if hint is float and type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is hint or (hint not in _WORDS and isinstance(value, hint))


def _word(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(_word(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a tuple, each of it {_word(get_args(hint)[0])}"
    if hint is NoneType:
        return "None"
    if issubclass(hint, StrEnum):
        return f"a {hint.__name__}: {', '.join(hint)}"
    return _WORDS.get(hint) or f"a {hint.__name__}"


def require(condition: bool, name: str, value: object, allowed: str) -> None:  # noqa: FBT001
    """Raise ``ConfigError`` that names the setting, its value and what is allowed, if not so."""
    if not condition:
        raise ConfigError(f"{name} = {shortly(value)}: allowed is {allowed}")


def check_paths(paths: tuple[str, ...]) -> None:
    """Require directories that can be, none of which lies in another: each is bounded by itself."""
    allowed = "directories, each named once, none inside another"
    for path in paths:
        require(bool(path) and "\0" not in path, "disk.path", path, "a path without NUL")
    parts = sorted(Path(path).parts for path in map(os.path.abspath, paths))
    apart = not any(below[: len(above)] == above for above, below in pairwise(parts))
    require(apart, "disk.more_paths", paths[1:], allowed)


def whole(name: str, nbytes: object) -> None:
    """Require a size that is a whole number: what rounds is not what was meant."""
    fits = type(nbytes) is int and 0 <= nbytes <= SIZE_BYTES_MAX
    require(fits, name, nbytes, "a whole number, 0 or more, and less than 2**63")


def check_workers(workers: tuple[Placement, ...]) -> None:
    """Require one placement for each rank and stage of one degree."""
    require(bool(workers), "workers", workers, "one placement or more")
    require(
        len({place.worker for place in workers}) == len(workers),
        "workers",
        [place.worker for place in workers],
        "a number for each worker that no other has",
    )
    require(
        len({(place.tp_rank, place.stage) for place in workers}) == len(workers),
        "workers",
        [(place.tp_rank, place.stage) for place in workers],
        "one worker for each rank and stage",
    )
    require(
        len({place.tp_size for place in workers}) == 1,
        "workers.tp_size",
        [place.tp_size for place in workers],
        "one size for all workers",
    )
    for place in workers:
        ranks = f"0 .. {place.tp_size - 1}"
        require(0 <= place.tp_rank < place.tp_size, "workers.tp_rank", place.tp_rank, ranks)
        require(place.stage >= 0, "workers.stage", place.stage, "0 or more")
