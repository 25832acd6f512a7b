"""Connectors that a test opens and that are closed when it ends."""

from __future__ import annotations

from typing import TypeVar

from kvtier.interfaces import Connector

_C = TypeVar("_C", bound=Connector)


class Opened:
    """Call it with a connector to have it closed by ``close_all``."""

    def __init__(self) -> None:
        self._open: list[Connector] = []

    def __call__(self, connector: _C) -> _C:
        self._open.append(connector)
        return connector

    async def close_all(self) -> None:
        for connector in self._open:
            await connector.close()
