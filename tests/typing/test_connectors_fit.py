"""Every connector and decorator fits its protocol, as a type checker and at run time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.interfaces import Connector, Listable
from kvtier.registry import connectors, decorators
from kvtier_connectors.decorators import Deadlined, Retrying, Sharded, Throttled, Timed
from kvtier_connectors.decorators.encrypted import Encrypted, FileKey, Keys
from kvtier_connectors.files import FileConnector
from kvtier_connectors.memory import MemoryConnector
from kvtier_connectors.redis import RedisConnector
from kvtier_connectors.redis.settings import parse_url as parse_redis_url
from kvtier_connectors.s3 import S3Connector
from kvtier_connectors.s3.settings import parse_url as parse_s3_url
from kvtier_connectors.server import ServerConnector
from kvtier_connectors.server.settings import parse_url as parse_server_url


class NoKeys:
    def key(self, tenant: str) -> bytes | None:
        return None


def test_media() -> None:
    made: list[Connector] = [
        MemoryConnector(),
        FileConnector(Path("/nowhere")),
        RedisConnector(parse_redis_url("redis://nowhere")),
        S3Connector(parse_s3_url("s3://nowhere")),
        ServerConnector(parse_server_url("kvtier://nowhere")),
    ]
    listable: list[Listable] = [
        MemoryConnector(),
        FileConnector(Path("/nowhere")),
        RedisConnector(parse_redis_url("redis://nowhere")),
        S3Connector(parse_s3_url("s3://nowhere")),
    ]
    assert all(isinstance(each, Connector) for each in made)
    assert all(isinstance(each, Listable) for each in listable)


def test_decorators(tmp_path: Path) -> None:
    inner, keys = MemoryConnector(), NoKeys()
    (tmp_path / "key").write_text("00" * 32)
    from_file: Keys = FileKey(str(tmp_path / "key"))
    key_source: Keys = keys
    made: list[Connector] = [
        Deadlined(inner, 1.0),
        Retrying(inner, seed=1),
        Throttled(inner),
        Timed(inner),
        Sharded({"only": inner}),
        Encrypted(inner, key_source, "tenant"),
        Encrypted(inner, from_file, ""),
    ]
    assert all(isinstance(each, Connector) for each in made)


@pytest.mark.parametrize("name", connectors.names())
def test_every_registered_connector_opens_by_url(name: str) -> None:
    assert callable(connectors.load(name).from_url)


@pytest.mark.parametrize("name", decorators.names())
def test_every_registered_decorator_opens_by_url(name: str) -> None:
    assert callable(decorators.load(name).from_url)
