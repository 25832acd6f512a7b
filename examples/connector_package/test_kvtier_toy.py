"""The toy connector is proved by KVTier's kit: the contract, and mischief all along its stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvtier_toy import ToyConnector
from toy_server import toy_server

from kvtier.errors import ConfigError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_contract import ConnectorContract
from kvtier.testing.connector_sweep import StreamSweep


@pytest.fixture(autouse=True)
def server(request: pytest.FixtureRequest) -> Iterator[None]:
    with toy_server() as address:
        if request.instance is not None:
            request.instance.where = address
        yield


class TestToyConnector(ConnectorContract):
    """What every connector promises."""

    where: tuple[str, int]

    def make_connector(self) -> Connector:
        """See ``ConnectorContract``."""
        return connect("toy://{}:{}".format(*self.where))


class TestToyStream(StreamSweep):
    """What it makes of mischief."""

    where: tuple[str, int]

    def address(self) -> tuple[str, int]:
        """See ``StreamSweep``."""
        return self.where

    def make_connector(self, port: int, timeout_s: float) -> Connector:
        """See ``StreamSweep``."""
        return ToyConnector("127.0.0.1", port, timeout_s=timeout_s)


@pytest.mark.parametrize("url", ["toy://host", "toy://host:1/x", "toy://h:1?timeot_s=1"])
def test_a_bad_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        ToyConnector.from_url(url)
