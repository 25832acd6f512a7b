"""The contract of connectors against whichever server the fixture ``server`` of a module runs."""

from __future__ import annotations

import pytest

import kvtier.registry
from kvtier.interfaces import Connector
from kvtier.testing.connector_contract import ConnectorContract, ListableContract
from tests.lib.redis_servers import RedisServer


class OverTcp(ConnectorContract, ListableContract):
    """By its port."""

    @pytest.fixture(autouse=True)
    def _url(self, server: RedisServer) -> None:
        self.url = server.url

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)


class OverAUnixSocket(OverTcp):
    """By its socket, with the options that change names and commands."""

    @pytest.fixture(autouse=True)
    def _url(self, server: RedisServer) -> None:
        self.url = f"redis+unix://{server.socket_path}?connections=1&ttl_s=100&prefix=a:*"
