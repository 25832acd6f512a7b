"""Decorators keep the connector contract, and a decorated listing lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier.registry
from kvtier.interfaces import Connector, Listable
from kvtier.testing.clock import FakeClock
from kvtier.testing.connector_contract import ConnectorContract, ListableContract, put
from kvtier.testing.faults import Faulty
from kvtier.types import KeyInfo
from kvtier_connectors.decorators import Deadlined, Retrying, Sharded, Throttled, Timed
from kvtier_connectors.decorators.encrypted import Encrypted
from kvtier_connectors.memory import MemoryConnector
from tests.lib.one_key import OneKey

WAYS: dict[str, Callable[[Connector], Connector]] = {
    "deadlined": lambda inner: Deadlined(inner, 30.0),
    "retrying": lambda inner: Retrying(inner, seed=1, clock=FakeClock()),
    "throttled": lambda inner: Throttled(inner, bytes_per_s=1e9, latency_s=1e-5),
    "timed": Timed,
    "sharded": lambda inner: Sharded({"only": inner}),
    "encrypted": lambda inner: Encrypted(inner, OneKey(), "tenant"),
}


class TestThrottled(ConnectorContract, ListableContract):
    def make_connector(self) -> Connector:
        return WAYS["throttled"](MemoryConnector())


class TestDeadlined(ConnectorContract):
    def make_connector(self) -> Connector:
        return WAYS["deadlined"](MemoryConnector())


class TestRetrying(ConnectorContract):
    def make_connector(self) -> Connector:
        return WAYS["retrying"](MemoryConnector())


class TestTimed(ConnectorContract):
    def make_connector(self) -> Connector:
        return WAYS["timed"](MemoryConnector())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_around_a_listable_it_lists_and_around_another_it_does_not(
    way: Callable[[Connector], Connector],
) -> None:
    decorated = way(MemoryConnector())
    assert isinstance(decorated, Connector)
    assert isinstance(decorated, Listable)
    await put(decorated, {b"a1": b"x", b"b1": b""})
    assert [info async for info in decorated.list(b"a")] == [KeyInfo(b"a1", 1)]
    await decorated.close()
    other = way(Faulty(MemoryConnector()))
    assert not isinstance(other, Listable)
    await other.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_closing_it_closes_the_inner_connector(
    way: Callable[[Connector], Connector],
) -> None:
    inner = MemoryConnector()
    await put(inner, {b"key": b"data"})
    await way(inner).close()
    assert await inner.contains([b"key"]) == [False]


class TestSharded(ConnectorContract, ListableContract):
    def make_connector(self) -> Connector:
        return Sharded({name: MemoryConnector() for name in ("a", "b", "c")})


class TestEncrypted(ConnectorContract, ListableContract):
    def make_connector(self) -> Connector:
        return WAYS["encrypted"](MemoryConnector())


class TestAllByUrl(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _url(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("0123456789abcdef" * 4)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        stores = f"file://{tmp_path}/a,{tmp_path}/b"
        self.url = f"encrypted+sharded+{stores}?encryption_key_file={tmp_path}/key"

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)
