"""What a user says about the cache behind a plug: one table in the engine's own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import (
    CacheConfig,
    DiskConfig,
    Durability,
    RemoteConfig,
    WriteMode,
)
from kvtier.constants import (
    GIB,
    LOAD_DEADLINE_S_DEFAULT,
    REMOTE_DEADLINE_S_DEFAULT,
    SLAB_BYTES_DEFAULT,
    STORE_DEADLINE_S,
)
from kvtier.errors import ConfigError
from kvtier_adapters.payloads.limits import (
    COPY_THREADS_DEFAULT,
    COPY_THREADS_MAX,
    DEADLINE_S_MAX,
    DRAM_BYTES_DEFAULT,
    LOOKUP_DEADLINE_S_DEFAULT,
)
from kvtier_adapters.tables import read_table

# Names as users write them, for fields whose name says their unit.
_SPELLED: Final = {"dram": "dram_bytes"}


@dataclass(frozen=True, slots=True)
class PlugOptions:
    """The cache of one plug in one process; sizes are those of that process.

    ``weights_id`` says which weights computed the KV, as a model with its revision does: two
    engines that differ in it share nothing. It must be given as soon as KV outlives the process,
    on a disk or in a remote. ``tenant_salt`` parts tenants. The deadlines bound what an engine's
    thread, or its request, waits for: a load, a store, a lookup. ``copy_threads`` copy between an
    engine's memory and the cache's at the same time. ``disk_codec`` names a byte codec.
    """

    dram_bytes: int = DRAM_BYTES_DEFAULT
    policy: str = "lru"
    disk: tuple[str, ...] = ()
    disk_bytes: int = 10 * GIB
    disk_codec: str = ""
    disk_policy: str = "lru"
    disk_admission: str = "everything"
    disk_write_bytes_per_day: int = 0
    disk_mode: WriteMode = WriteMode.THROUGH
    durability: Durability = Durability.NONE
    remote: tuple[str, ...] = ()
    remote_bytes: int = 0
    remote_mode: WriteMode = WriteMode.THROUGH
    remote_deadline_s: float = REMOTE_DEADLINE_S_DEFAULT
    load_deadline_s: float = LOAD_DEADLINE_S_DEFAULT
    store_deadline_s: float = STORE_DEADLINE_S
    lookup_deadline_s: float = LOOKUP_DEADLINE_S_DEFAULT
    copy_threads: int = COPY_THREADS_DEFAULT
    weights_id: str = ""
    tenant_salt: str = ""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for options that cannot be, or are dangerous together."""
        for name in ("load_deadline_s", "store_deadline_s", "lookup_deadline_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= DEADLINE_S_MAX:
                allowed = f"more than 0, and at most {DEADLINE_S_MAX:g}"
                raise ConfigError(f"{name} = {seconds!r}: allowed is {allowed}")
        if not 1 <= self.copy_threads <= COPY_THREADS_MAX:
            allowed = f"1 .. {COPY_THREADS_MAX}"
            raise ConfigError(f"copy_threads = {self.copy_threads!r}: allowed is {allowed}")
        if (self.disk or self.remote) and not self.weights_id:
            raise ConfigError(
                "weights_id is missing: what lies on a disk or in a remote is found again by "
                "processes that may serve other weights under the same name; say which these are, "
                "as in 'meta-llama/Llama-3.1-8B-Instruct@0e9e39f'"
            )

    def cache_config(self, folder: str = "") -> CacheConfig:
        """Return the cache to open; ``folder`` is this process's own below each disk.

        A directory belongs to one process. Raises ``ConfigError`` for settings that cannot be.
        """
        disk = None
        if self.disk:
            first, *more = (str(Path(path, folder)) for path in self.disk)
            disk = DiskConfig(
                first,
                self.disk_bytes,
                self.durability,
                self.disk_mode,
                policy=self.disk_policy,
                more_paths=tuple(more),
                admission=self.disk_admission,
                write_bytes_per_day=self.disk_write_bytes_per_day,
                byte_codec=self.disk_codec or None,
            )
        remotes = tuple(
            RemoteConfig(
                url, self.remote_bytes, mode=self.remote_mode, deadline_s=self.remote_deadline_s
            )
            for url in self.remote
        )
        return CacheConfig(
            self.dram_bytes,
            disk,
            remotes,
            policy=self.policy,
            slab_bytes=min(SLAB_BYTES_DEFAULT, self.dram_bytes or SLAB_BYTES_DEFAULT),
            load_deadline_s=self.load_deadline_s,
            pending_deadline_s=self.lookup_deadline_s,
        )


def plug_options(table: object, where: str) -> PlugOptions:
    """Read the options from the table that an engine hands on; none is the same as an empty one.

    Sizes may be texts, ``disk`` and ``remote`` one text or several. Raises ``ConfigError`` that
    names ``where`` the table stands and what is wrong in it.
    """
    return read_table(PlugOptions, table, where, _SPELLED)
