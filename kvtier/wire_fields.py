"""Fields of the wire's headers, each checked before it is believed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.errors import KVTierError

#: Takes what a reader of msgpack gave; returns it, or raises ``WireError``.
Check = Callable[[Any], Any]


class WireError(KVTierError):
    """Bytes that are no frame of this wire, or one that may not come from this side."""


class WireVersionError(WireError):
    """A frame of a version that this one does not speak."""


def integer(low: int, high: int) -> Check:
    """Take whole numbers from ``low`` to ``high``."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"a field is {shown(value)}; allowed are {low} .. {high}")
        return value

    return check


def binary(low: int, high: int) -> Check:
    """Take ``low`` to ``high`` bytes."""

    def check(value: Any) -> bytes:
        if not isinstance(value, bytes) or not low <= len(value) <= high:
            raise WireError(f"a field that is not {low} .. {high} bytes")
        return value

    return check


def text(value: Any) -> str:
    """Take text."""
    if not isinstance(value, str):
        raise WireError(f"a field is {shown(value)}; allowed is text")
    return value


def row(check: Check) -> Check:
    """Take a list of what ``check`` takes."""

    def checked(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise WireError(f"a field is {shown(values)}; allowed is a list")
        return tuple(map(check, values))

    return checked


def boolean(value: Any) -> bool:
    """Take true and false."""
    if not isinstance(value, bool):
        raise WireError(f"a field is {shown(value)}; allowed are true and false")
    return value


def shown(value: Any) -> str:
    """Return a word for a value: never its bytes, which may be a secret, or many."""
    return str(value) if type(value) is int else f"a {type(value).__name__}"
