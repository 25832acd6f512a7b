"""The memory connector, and the fault decorators around it, keep the connector contract."""

from __future__ import annotations

import gc

import pytest

import kvtier.registry
from kvtier.errors import ConfigError, ConnectorUnavailableError
from kvtier.interfaces import Connector, Listable
from kvtier.testing.clock import FakeClock
from kvtier.testing.connector_contract import ConnectorContract, ListableContract, get_whole, put
from kvtier.testing.faults import Faulty, Slow
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.memory import MemoryConnector


class TestMemoryConnector(ConnectorContract, ListableContract):
    def make_connector(self) -> Connector:
        return MemoryConnector()


class TestFaultyWithoutFaults(ConnectorContract):
    def make_connector(self) -> Connector:
        return Faulty(MemoryConnector())


class TestSlowWithoutDelay(ConnectorContract):
    def make_connector(self) -> Connector:
        return Slow(MemoryConnector(), 0.0, FakeClock())


async def test_one_name_is_one_store_while_it_is_open() -> None:
    first = kvtier.registry.connect("memory://shared-name")
    second = kvtier.registry.connect("memory://shared-name")
    other = kvtier.registry.connect("memory://another-name")
    await put(first, {b"key": b"data"})
    assert await get_whole(second, {b"key": 4}) == [b"data"]
    assert await other.contains([b"key"]) == [False]
    await first.close()
    assert await second.contains([b"key"]) == [True]
    await second.close()
    del first, second
    gc.collect()
    reopened = kvtier.registry.connect("memory://shared-name")
    assert await reopened.contains([b"key"]) == [False]


async def test_without_a_name_each_has_its_own_store() -> None:
    first = kvtier.registry.connect("memory://")
    second = kvtier.registry.connect("memory://")
    await put(first, {b"key": b"data"})
    assert await second.contains([b"key"]) == [False]


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory:// URL has no 'capacity'"):
        kvtier.registry.connect("memory://name?capacity=3")


async def test_after_close_outcomes_are_errors() -> None:
    connector = MemoryConnector()
    await put(connector, {b"key": b"data"})
    await connector.close()
    (read,) = await connector.read([ReadRequest(b"key", 0, 4)], [memoryview(bytearray(4))])
    (written,) = await connector.write([WriteItem(b"key", memoryview(b"data"))])
    assert isinstance(read, ConnectorUnavailableError)
    assert isinstance(written, ConnectorUnavailableError)
    assert await connector.contains([b"key"]) == [False]
    await connector.delete([b"key"])
    assert [info async for info in connector.list(b"")] == []


async def test_list_by_prefix() -> None:
    connector = MemoryConnector()
    assert isinstance(connector, Listable)
    await put(connector, {b"a1": b"x", b"a2": b"xy", b"b1": b""})
    found = [info async for info in connector.list(b"a")]
    assert sorted(found, key=lambda info: info.key) == [KeyInfo(b"a1", 1), KeyInfo(b"a2", 2)]
