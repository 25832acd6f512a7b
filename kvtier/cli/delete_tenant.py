"""``kvtier delete-tenant``: the end of a tenant where no process runs that could be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.cache.cache import Cache
from kvtier.cli.secrets import read_salt
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig, format_size
from kvtier.constants import ALIGN_BYTES, HOUSEKEEPING_S
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import tenant_digest
from kvtier.types import Tier

#: No chunk leaves for want of room.
_CAPACITY_BYTES: Final = 1 << 62
_OPEN_S_MAX: Final = 600.0
#: For a remote to answer: more than a connector's deadline and all of its tries.
_ANSWER_S_MAX: Final = 10.0
_RECLAIM_S_MAX: Final = 600.0
_CLOSE_S_MAX: Final = 60.0


def delete_tenant(
    salt_file: Annotated[
        Path, typer.Option(help="File with the tenant's salt (cache_salt); - reads it from stdin.")
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Directory of a disk tier; all of them, if several."
        ),
    ] = None,
    remote: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Remote that is to know of it too; may be repeated."),
    ] = None,
) -> None:
    """Make everything that a tenant has stored unreachable, for good, and give its bytes back.

    No engine may use the directories; the remotes may be in use. The salt is never shown; its
    digest is.
    """
    salt = read_salt(salt_file)
    folders, urls = paths or [], remote or []
    if not folders and not urls:
        raise ConfigError("PATH: allowed are one or more, or none with --remote URL")
    for path in folders:
        if not (path / "shards").is_dir():
            raise ConfigError(f"{path} is no disk tier: it has no folder 'shards'")
    disk = None
    if folders:
        first, *more = map(str, folders)
        disk = DiskConfig(first, _CAPACITY_BYTES, more_paths=tuple(more))
    remotes = tuple(map(RemoteConfig, urls))
    cache = Cache(CacheConfig(ALIGN_BYTES, disk, remotes, slab_bytes=ALIGN_BYTES))
    try:
        nbytes = _delete(cache, salt)
    finally:
        cache.close(timeout_s=_CLOSE_S_MAX)
    told = f", {len(urls)} remote{'s' if len(urls) > 1 else ''} told" if urls else ""
    name = tenant_digest(salt).hex()
    typer.echo(f"tenant {name}: deleted, {format_size(nbytes)} given back{told}")


def _delete(cache: Cache, salt: str) -> int:
    """Return the bytes that are given back on disk."""
    clock = SystemClock()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("opening", total=None)
        _until_ok(clock, _OPEN_S_MAX, "the directory", lambda: _disk_states(cache))
        _until_ok(clock, _ANSWER_S_MAX, "a remote", lambda: _remote_states(cache))
        nbytes = cache.tenants.nbytes(salt)
        cache.tenants.delete(salt)
        progress.update(task, description="giving back", total=max(nbytes, 1))
        end = clock.now() + _RECLAIM_S_MAX

        def under_way() -> bool:
            return bool(cache.tenants.nbytes(salt) or cache.stats().deletions_queued)

        while under_way() and clock.now() < end:
            left = cache.tenants.nbytes(salt)
            progress.update(task, completed=nbytes - left)
            clock.sleep(HOUSEKEEPING_S)
    return nbytes - cache.tenants.nbytes(salt)


def _until_ok(
    clock: SystemClock,
    seconds_max: float,
    what: str,
    states: Callable[[], Sequence[tuple[str, str]]],
) -> None:
    """Wait until nothing opens any more. Raises ``TierUnavailableError`` unless all is well."""
    end = clock.now() + seconds_max
    while any(state == "opening" for state, _ in states()) and clock.now() < end:
        clock.sleep(HOUSEKEEPING_S)
    for state, detail in states():
        if state != "ok":
            raise TierUnavailableError(f"{what} cannot be used: {detail}")


def _disk_states(cache: Cache) -> list[tuple[str, str]]:
    tiers = cache.stats().tiers
    return [(tier.state, tier.detail) for tier in tiers if tier.tier is Tier.DISK]


def _remote_states(cache: Cache) -> list[tuple[str, str]]:
    return [(each.state, each.detail) for each in cache.stats().remotes]
