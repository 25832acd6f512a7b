"""Decorators: a connector around a connector, with the same five methods and one thing more.

They stack: ``Timed(Retrying(Deadlined(connect("redis://host"), 0.5)))``. Around a ``Listable`` each
is ``Listable`` too. Each belongs to one event loop.
"""

from __future__ import annotations

from typing import Any

from kvtier.registry import import_problem
from kvtier_connectors.decorators.base import Decorator
from kvtier_connectors.decorators.deadlined import Deadlined
from kvtier_connectors.decorators.retrying import Retrying
from kvtier_connectors.decorators.sharded import Sharded
from kvtier_connectors.decorators.throttled import Throttled
from kvtier_connectors.decorators.timed import Calls, Timed

__all__ = ["Calls", "Deadlined", "Decorator", "Retrying", "Sharded", "Throttled", "Timed"]


def __getattr__(name: str) -> Any:
    """Give ``Encrypted``, for which alone an extra must be installed."""
    if name != "Encrypted":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvtier_connectors.decorators.encrypted import Encrypted
    except ImportError as error:
        raise import_problem(error, name) from error
    return Encrypted
