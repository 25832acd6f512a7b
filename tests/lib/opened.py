"""Connectors that a test opens and that are closed when it ends; calls for one object."""

from __future__ import annotations

from typing import TypeVar

from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector
from kvtier.testing.connector_contract import get
from kvtier.types import ReadRequest, WriteItem

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


async def write_one(connector: Connector, key: bytes, data: bytes) -> ConnectorError | None:
    """Return the outcome of a write; None: it is stored."""
    (outcome,) = await connector.write([WriteItem(key, memoryview(data))])
    return outcome


async def read_one(connector: Connector, key: bytes, nbytes: int) -> object:
    """Return the bytes, or the outcome that stands for them."""
    ((outcome, data),) = await get(connector, [ReadRequest(key, 0, nbytes)])
    return data if isinstance(outcome, int) else outcome
