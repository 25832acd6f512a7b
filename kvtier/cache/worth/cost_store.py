"""Measured costs in a small file beside the disk tier, so that a restart need not learn anew.

What is not whole, or of another version, counts as not there: the costs are then measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from kvtier.constants import COST_FILE_BYTES_MAX, COST_KEPT_POINTS_MAX, COST_NAMES_MAX

_log = logging.getLogger("kvtier.cost")

#: The file beside a disk tier's chunks.
FILE: Final = "costs.json"
_VERSION: Final = 1
#: What no measurement is beyond; lines through such points would be beyond what a float can hold.
_LEAST: Final = 1e-18
_MOST: Final = 1e18

PointList = list[tuple[float, float]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptPrefill:
    """Steps of one model on one device, and how their cost grows."""

    points: PointList
    growth: float


@dataclass(frozen=True, slots=True)
class Kept:
    """Measurements by link, by codec, and by model with its device."""

    links: Mapping[str, PointList] = field(default_factory=dict)
    moves: Mapping[str, PointList] = field(default_factory=dict)
    prefill: Mapping[str, KeptPrefill] = field(default_factory=dict)


def name_of(text: str) -> str:
    """Return a name for a path or URL that tells nothing of it.

    What stands before ``@`` may be a password, which nobody shall guess by this name.
    """
    bare = re.sub(r"//[^/@]*@", "//", text)
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def save(path: Path, kept: Kept) -> None:
    """Replace the file, whole. Blocks. What the system refuses is logged and left."""
    prefill = {
        name: {"growth": each.growth, "points": each.points}
        for name, each in _latest(kept.prefill).items()
    }
    links, moves = _latest(kept.links), _latest(kept.moves)
    table = {"version": _VERSION, "links": links, "moves": moves, "prefill": prefill}
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(json.dumps(table))
        new.replace(path)
    except OSError as error:
        _log.info("costs were not kept: %s", error)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def load(path: Path) -> Kept:
    """Return what was kept, or nothing. Blocks."""
    try:
        with path.open("rb") as file:
            data = file.read(COST_FILE_BYTES_MAX + 1)
    except OSError:
        return Kept()
    try:
        return _parsed(data)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        _log.info("%s is not used: %s", path, error)
        return Kept()


def _latest(table: Mapping[str, T]) -> dict[str, T]:
    return dict(list(table.items())[-COST_NAMES_MAX:])


def _parsed(data: bytes) -> Kept:
    if len(data) > COST_FILE_BYTES_MAX:
        raise ValueError("too long")
    table = json.loads(data)
    if table["version"] != _VERSION:
        raise ValueError(f"version {table['version']}")
    return Kept(
        links={str(name): _points(each) for name, each in table["links"].items()},
        moves={str(name): _points(each) for name, each in table["moves"].items()},
        prefill={
            str(name): KeptPrefill(_points(each["points"]), _number(each["growth"]))
            for name, each in table["prefill"].items()
        },
    )


def _points(values: Any) -> PointList:
    if len(values) > COST_KEPT_POINTS_MAX:
        raise ValueError("too many points")
    points = [(_number(x), _number(y)) for x, y in values]
    if not all(min(point) > _LEAST for point in points):
        raise ValueError("a point is not above zero")
    return points


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < _MOST:  # Not a number is neither.
        raise ValueError(f"{value!r} is no measurement")
    return number
