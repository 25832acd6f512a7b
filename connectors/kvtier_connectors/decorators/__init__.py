"""Decorators: a connector around a connector, with the same five methods and one thing more.

They stack: ``Timed(Retrying(Deadlined(connect("redis://host"), 0.5)))``. Around a ``Listable`` each
is ``Listable`` too. Each belongs to one event loop.
"""

from __future__ import annotations

from kvtier_connectors.decorators.base import Decorator
from kvtier_connectors.decorators.deadlined import Deadlined
from kvtier_connectors.decorators.retrying import Retrying
from kvtier_connectors.decorators.throttled import Throttled
from kvtier_connectors.decorators.timed import Calls, Timed

__all__ = ["Calls", "Deadlined", "Decorator", "Retrying", "Throttled", "Timed"]
