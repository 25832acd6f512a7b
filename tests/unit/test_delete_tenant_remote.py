"""``kvtier delete-tenant --remote``: a remote learns of the end, and what is known of it goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtier.cache.cache import Cache
from kvtier.cli.main import app
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.errors import ConfigError, ConnectorUnavailableError, KVTierError, TierUnavailableError
from kvtier.keys import tenant_digest
from kvtier.testing.engine_double import EngineDouble
from kvtier.types import KVLayout, Namespace
from kvtier_connectors.memory import MemoryConnector
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    LAYOUT,
    SPLIT,
    of_tenant,
    ranks,
    settle,
    written,
)
from tests.lib.outside_store import Store

FIVE = range(5 * CHUNK)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    where = tmp_path / "remote"
    where.mkdir()
    return Store(f"file://{where}" if request.param == "file" else f"memory://{tmp_path.name}")


@contextmanager
def host(store: Store, folder: Path | None, layout: KVLayout = LAYOUT) -> Iterator[EngineDouble]:
    """A process that serves tenant ``ours``, with a disk in ``folder`` or without one."""
    disk = DiskConfig(str(folder), 64 * CHUNK_BYTES) if folder is not None else None
    placements = ranks(layout.head_groups)
    remotes = (RemoteConfig(store.url),)
    config = CacheConfig(64 * CHUNK_BYTES, disk, remotes, slab_bytes=4096, workers=placements)
    cache = Cache(config)
    namespace = Namespace("weights", layout, tenant_salt="ours")
    engine = EngineDouble(cache, namespace, placements=placements, block_tokens=BLOCK)
    try:
        yield engine
        settle(engine)
    finally:
        engine.close()
        cache.close()


def stored(engine: EngineDouble) -> None:
    engine.store(engine.sequence(FIVE))
    written(engine)


def filled(store: Store, folder: Path) -> None:
    """Five chunks of each of two tenants, on disk and in the remote."""
    with host(store, folder) as ours, closing(of_tenant(ours, "theirs")) as theirs:
        stored(ours)
        stored(theirs)
    assert len(store.listed()) == 10


def found(store: Store, salt: str = "ours") -> int:
    """Tokens that another host, which has the remote alone, finds."""
    with host(store, None) as engine, closing(of_tenant(engine, salt)) as double:
        return double.match(double.sequence(FIVE)).tokens


def run(*arguments: object, told: str = "ours") -> Result:
    command = ["delete-tenant", "--salt-file", "-", *map(str, arguments)]
    result = CliRunner().invoke(app, command, input=told)
    if isinstance(result.exception, KVTierError):
        raise result.exception
    return result


def test_what_the_directory_knows_of_leaves_the_remote_too(store: Store, tmp_path: Path) -> None:
    filled(store, tmp_path / "disk")
    result = run(tmp_path / "disk", "--remote", store.url)
    assert result.exit_code == 0, result.output
    digest = tenant_digest("ours").hex()
    assert result.stdout == f"tenant {digest}: deleted, 80 KiB given back, 1 remote told\n"
    assert len(store.listed()) == 5
    assert (found(store), found(store, "theirs")) == (0, len(FIVE))


def test_shards_of_every_rank_leave(store: Store, tmp_path: Path) -> None:
    with host(store, tmp_path / "disk", SPLIT) as engine:
        stored(engine)
    assert len(store.listed()) == 10
    run(tmp_path / "disk", "--remote", store.url)
    assert store.listed() == []


def test_a_remote_alone_learns_of_the_end(store: Store, tmp_path: Path) -> None:
    """What lies there is unreachable for every host that reads the epochs, old and new ones."""
    filled(store, tmp_path / "disk")
    assert found(store) == len(FIVE)
    run("--remote", store.url)
    assert (found(store), found(store, "theirs")) == (0, len(FIVE))
    with host(store, tmp_path / "disk") as engine:
        assert engine.match(engine.sequence(FIVE)).tokens == 0


def test_a_remote_that_does_not_delete_at_first_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"memory://{tmp_path.name}")
    filled(store, tmp_path / "disk")
    delete = MemoryConnector.delete
    calls = itertools.count()

    async def failing_once(connector: MemoryConnector, keys: Sequence[bytes]) -> None:
        if next(calls) < 8:  # More than one call tries it.
            raise ConnectorUnavailableError("busy")
        await delete(connector, keys)

    monkeypatch.setattr(MemoryConnector, "delete", failing_once)
    run(tmp_path / "disk", "--remote", store.url)
    assert len(store.listed()) == 5


def test_every_remote_is_told(tmp_path: Path) -> None:
    stores = [Store(f"memory://{tmp_path.name}-{number}") for number in range(2)]
    for number, store in enumerate(stores):
        filled(store, tmp_path / f"disk-{number}")
    run("--remote", stores[0].url, "--remote", stores[1].url)
    assert [found(store) for store in stores] == [0, 0]


def test_a_remote_that_is_away_keeps_everything_as_it_is(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path.name}")
    filled(store, tmp_path / "disk")
    with pytest.raises(TierUnavailableError, match="remote cannot be used"):
        run(tmp_path / "disk", "--remote", f"file://{tmp_path}/nowhere")
    with host(store, tmp_path / "disk") as engine:
        assert engine.match(engine.sequence(FIVE)).tokens == len(FIVE)


def test_something_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--remote"):
        run()


def test_a_url_that_cannot_be_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(KVTierError) as refused:
        run("--remote", f"redis://user:secret@host/{tmp_path.name}?what=1")
    assert "secret" not in str(refused.value)
