"""Settings that are read anew: what a running server goes by then, whatever lies on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier_server.credentials import Door
from kvtier_server.live import Live
from kvtier_server.settings import Address, DaemonConfig
from tests.lib.plane import data_plane


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def remove(path: Path) -> None:
    path.unlink()


async def test_a_socket_that_somebody_has_removed_keeps_nothing_from_being_changed(
    tmp_path: Path,
) -> None:
    async with data_plane(tmp_path) as plane:
        path = Path(plane.path)
        before = DaemonConfig((Address(path=str(path)),), CacheConfig(64 * MIB), Door(None))
        after = replace(before, door=Door(None, frozenset({4711})), idle_s=7.0)
        told = [after, before]
        live = Live(before, lambda: told.pop(0), plane.cache, plane.plane, [])
        assert mode_of(path) == 0o600
        assert await live.reload() == ["allow_uid", "idle_seconds"]
        assert mode_of(path) == 0o666
        remove(path)
        assert await live.reload() == ["allow_uid", "idle_seconds"]
        assert live.config is before
