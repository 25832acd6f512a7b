"""``kvtier delete-tenant``: the end of a tenant in a disk tier that no process uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.cache.cache import Cache
from kvtier.cli.secrets import read_salt
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig, DiskConfig, format_size
from kvtier.constants import ALIGN_BYTES, HOUSEKEEPING_S
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import tenant_digest

#: No chunk leaves for want of room.
_CAPACITY_BYTES: Final = 1 << 62
_OPEN_S_MAX: Final = 600.0
_RECLAIM_S_MAX: Final = 600.0


def delete_tenant(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Directory of a disk tier; all of them, if several."
        ),
    ],
    salt_file: Annotated[
        Path, typer.Option(help="File with the tenant's salt (cache_salt); - reads it from stdin.")
    ],
) -> None:
    """Make everything that a tenant has stored unreachable, for good, and give its bytes back.

    The engine must not be running. The salt is never shown; its digest is.
    """
    salt = read_salt(salt_file)
    for path in paths:
        if not (path / "shards").is_dir():
            raise ConfigError(f"{path} is no disk tier: it has no folder 'shards'")
    first, *more = map(str, paths)
    disk = DiskConfig(first, _CAPACITY_BYTES, more_paths=tuple(more))
    cache = Cache(CacheConfig(dram_bytes=ALIGN_BYTES, disk=disk, slab_bytes=ALIGN_BYTES))
    try:
        nbytes = _delete(cache, salt)
    finally:
        cache.close()
    typer.echo(f"tenant {tenant_digest(salt).hex()}: deleted, {format_size(nbytes)} given back")


def _delete(cache: Cache, salt: str) -> int:
    """Return the bytes that are given back."""
    clock = SystemClock()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("opening", total=None)
        end = clock.now() + _OPEN_S_MAX
        while (state := cache.stats().tiers[1]).state == "opening" and clock.now() < end:
            clock.sleep(HOUSEKEEPING_S)
        if state.state != "ok":
            raise TierUnavailableError(f"the directory cannot be used: {state.detail}")
        nbytes = cache.tenants.nbytes(salt)
        cache.tenants.delete(salt)
        progress.update(task, description="giving back", total=max(nbytes, 1))
        end = clock.now() + _RECLAIM_S_MAX
        while (left := cache.tenants.nbytes(salt)) and clock.now() < end:
            progress.update(task, completed=nbytes - left)
            clock.sleep(HOUSEKEEPING_S)
    return nbytes - left
