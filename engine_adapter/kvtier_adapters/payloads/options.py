"""What a user says about the cache behind a plug: one table in the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtier.config import CacheConfig, DiskConfig, RemoteConfig, from_table
from kvtier.constants import LOAD_DEADLINE_S_DEFAULT, SLAB_BYTES_DEFAULT, STORE_DEADLINE_S
from kvtier.errors import ConfigError
from kvtier_adapters.payloads.limits import (
    COPY_THREADS_DEFAULT,
    COPY_THREADS_MAX,
    DEADLINE_S_MAX,
    DRAM_BYTES_DEFAULT,
    LOOKUP_DEADLINE_S_DEFAULT,
)


@dataclass(frozen=True, slots=True)
class PlugOptions:
    """The cache of one plug in one process.

    ``weights_id`` says which weights computed the KV, as a model with its revision does: two
    engines that differ in it share nothing. It must be given as soon as KV outlives the process,
    on a disk or in a remote. ``tenant_salt`` parts tenants. The deadlines bound what an engine's
    thread, or its request, may wait for: a get, a put, a lookup. ``copy_threads`` copy between an
    engine's memory and the cache's at the same time. The rest is as in ``CacheConfig``; sizes are
    those of one process.
    """

    dram_bytes: int = DRAM_BYTES_DEFAULT
    disk: DiskConfig | None = None
    remotes: tuple[RemoteConfig, ...] = ()
    policy: str = "lru"
    slab_bytes: int = SLAB_BYTES_DEFAULT
    weights_id: str = ""
    tenant_salt: str = ""
    get_deadline_s: float = LOAD_DEADLINE_S_DEFAULT
    put_deadline_s: float = STORE_DEADLINE_S
    lookup_deadline_s: float = LOOKUP_DEADLINE_S_DEFAULT
    copy_threads: int = COPY_THREADS_DEFAULT

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for options that cannot be, or are dangerous together."""
        for name in ("get_deadline_s", "put_deadline_s", "lookup_deadline_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= DEADLINE_S_MAX:
                allowed = f"more than 0, and at most {DEADLINE_S_MAX:g}"
                raise ConfigError(f"{name} = {seconds!r}: allowed is {allowed}")
        if not 1 <= self.copy_threads <= COPY_THREADS_MAX:
            allowed = f"1 .. {COPY_THREADS_MAX}"
            raise ConfigError(f"copy_threads = {self.copy_threads!r}: allowed is {allowed}")
        if (self.disk or self.remotes) and not self.weights_id:
            raise ConfigError(
                "weights_id is missing: what lies on a disk or in a remote is found again by "
                "processes that may serve other weights under the same name; say which these are, "
                "as in 'meta-llama/Llama-3.1-8B-Instruct@0e9e39f'"
            )

    @property
    def cache_config(self) -> CacheConfig:
        """The cache to open. Raises ``ConfigError`` for settings that cannot be."""
        return CacheConfig(
            self.dram_bytes,
            self.disk,
            self.remotes,
            policy=self.policy,
            slab_bytes=self.slab_bytes,
            pending_deadline_s=self.lookup_deadline_s,
        )

    def in_folder(self, name: str) -> PlugOptions:
        """Return the options with a folder of its own below each of the disk's directories.

        For ranks that are processes: a directory belongs to one process.
        """
        if self.disk is None:
            return self
        path, *more = (f"{path.rstrip('/')}/{name}" for path in self.disk.paths)
        return replace(self, disk=replace(self.disk, path=path, more_paths=tuple(more)))


def plug_options(table: object, where: str) -> PlugOptions:
    """Read the options from the table that an engine hands on; none is the same as an empty one.

    Raises ``ConfigError`` that names ``where`` the table stands and what is wrong in it.
    """
    if table is None:
        table = {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r}: allowed is a table of options")
    try:
        options = from_table(PlugOptions, _texts(table))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return options


def _texts(table: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in table.items()}
