"""The example of a connector of one's own keeps the contract, and says what went wrong."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, ConnectorDataError, ConnectorUnavailableError
from kvtier.interfaces import Connector
from kvtier.testing.connector_contract import ConnectorContract, ListableContract, get, put
from kvtier.types import ReadRequest
from tests.tidy.sources import ROOT

SqliteConnector: Any = runpy.run_path(str(ROOT / "examples" / "own_connector.py"))[
    "SqliteConnector"
]


class TestSqliteConnector(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_connector(self) -> Connector:
        connector: Connector = SqliteConnector.from_url(f"sqlite://{self.folder}/kv.db")
        return connector


async def test_a_file_that_is_none_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "kv.db").write_bytes(b"no database" * 100)
    for path, kind in (("kv.db", ConnectorDataError), ("nowhere/kv.db", ConnectorUnavailableError)):
        connector = SqliteConnector(str(tmp_path / path))
        ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 1)])
        assert isinstance(outcome, kind)
        assert await connector.contains([b"key"]) == [False]
        await connector.close()


async def test_after_close_outcomes_are_errors(tmp_path: Path) -> None:
    connector = SqliteConnector(str(tmp_path / "kv.db"))
    await put(connector, {b"key": b"data"})
    await connector.close()
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 1)])
    assert isinstance(outcome, ConnectorUnavailableError)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite:///x.db?timeot_s=1", r"no 'timeot_s' \(did you mean 'timeout_s'\?\)"),
        ("sqlite:///x.db?timeout_s=soon", "no number"),
        ("sqlite://x.db", "three slashes"),
    ],
)
def test_a_bad_url_is_a_config_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        SqliteConnector.from_url(url)
