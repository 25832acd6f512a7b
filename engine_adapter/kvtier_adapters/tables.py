"""Options as engines hand them on: a table of JSON, in the words of ``kvtier-serve``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from kvtier.config import from_table, reject_unknown
from kvtier.errors import ConfigError

OptionsT = TypeVar("OptionsT")

# One text or several.
_LISTS: Final = ("disk", "remote")


def read_table(
    kind: type[OptionsT], table: object, where: str, spelled: Mapping[str, str]
) -> OptionsT:
    """Build a dataclass of options from a table; None is the same as an empty one.

    ``spelled`` maps names as users write them to fields whose name says their unit. Raises
    ``ConfigError`` that names ``where`` the table stands and what is wrong in it, for an unknown
    name with the nearest one.
    """
    table = {} if table is None else table
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r}: allowed is a table of options")
    names = {field: name for name, field in spelled.items()}
    every: tuple[Any, ...] = fields(kind)  # type: ignore[arg-type]
    reject_unknown(table, [names.get(each.name, each.name) for each in every], where)
    values: dict[str, Any] = {}
    for name, value in {str(name): value for name, value in table.items()}.items():
        one = name in _LISTS and isinstance(value, str)
        values[spelled.get(name, name)] = [value] if one else value
    try:
        return from_table(kind, values, where)
    except ConfigError as error:
        text = str(error)
        for name, field in spelled.items():
            text = text.replace(f"{where}.{field}", f"{where}.{name}")
        raise ConfigError(text) from error
