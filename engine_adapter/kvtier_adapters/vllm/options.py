"""The options of ``kv_connector_extra_config``, parsed once and checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvtier.config import (
    CacheConfig,
    DiskConfig,
    Durability,
    RemoteConfig,
    WriteMode,
)
from kvtier.constants import (
    CHUNK_TOKENS_DEFAULT,
    GIB,
    LOAD_DEADLINE_S_DEFAULT,
    PENDING_DEADLINE_S_DEFAULT,
    REMOTE_DEADLINE_S_DEFAULT,
    SLAB_BYTES_DEFAULT,
)
from kvtier.errors import ConfigError
from kvtier.registry import split_codec
from kvtier.types import Placement
from kvtier_adapters.tables import read_table

_WHERE: Final = "kv_connector_extra_config"
# Names as users write them, for fields whose name says their unit.
_SPELLED: Final = {"dram": "dram_bytes", "tenant_quota": "tenant_quota_bytes"}


class BlockForm(StrEnum):
    """How blocks are stored: as K and V that others can read, or as bytes that mean nothing."""

    AUTO = "auto"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Options:
    """One field per option; the guide says what each does. Sizes are in bytes."""

    dram_bytes: int = GIB
    policy: str = "lru"
    codec: str = "raw"
    disk: tuple[str, ...] = ()
    disk_bytes: int = 10 * GIB
    disk_codec: str = ""
    disk_mode: WriteMode = WriteMode.THROUGH
    disk_policy: str = "lru"
    disk_admission: str = "everything"
    disk_write_bytes_per_day: int = 0
    durability: Durability = Durability.NONE
    remote: tuple[str, ...] = ()
    remote_bytes: int = 0
    remote_mode: WriteMode = WriteMode.THROUGH
    remote_deadline_s: float = REMOTE_DEADLINE_S_DEFAULT
    load_deadline_s: float = LOAD_DEADLINE_S_DEFAULT
    pending_deadline_s: float = PENDING_DEADLINE_S_DEFAULT
    gpu_time_worth: float = 1.0
    tenant_quota_bytes: int = 0
    chunk_tokens: int = CHUNK_TOKENS_DEFAULT
    head_groups: int = 0
    weights_id: str = ""
    blocks: BlockForm = BlockForm.AUTO
    keep_on_reset: bool = False
    any_version: bool = False

    def chunk_tokens_for(self, block_tokens: int, window_tokens: int = 0) -> int:
        """Return the chunk's size: what was asked for, or the least above the default that fits.

        Where vLLM goes on behind a prefix that it has itself, no more of a window is in its blocks.
        So that the chunk which is under way there can be stored, it has to lie in the smallest one,
        of ``window_tokens``; 0: there is none. Raises ``ConfigError`` for a size that was asked for
        and is larger, or no multiple of vLLM's blocks.
        """
        largest = window_tokens // block_tokens * block_tokens + block_tokens
        if window_tokens and self.chunk_tokens > largest:
            if self.chunk_tokens != CHUNK_TOKENS_DEFAULT:
                raise ConfigError(
                    f"{_WHERE}.chunk_tokens = {self.chunk_tokens}: the model's smallest sliding "
                    f"window is {window_tokens + 1} tokens; allowed is up to {largest}"
                )
            return largest
        if self.chunk_tokens % block_tokens == 0:
            return self.chunk_tokens
        if self.chunk_tokens != CHUNK_TOKENS_DEFAULT:
            raise ConfigError(
                f"{_WHERE}.chunk_tokens = {self.chunk_tokens}: allowed is a multiple of vLLM's "
                f"block size, {block_tokens}"
            )
        return -(-self.chunk_tokens // block_tokens) * block_tokens

    def cache_config(
        self,
        workers: tuple[Placement, ...],
        *,
        shared: bool,
        folder: str = "",
        events: bool = False,
    ) -> CacheConfig:
        """Return the cache that is asked for. ``folder`` is this engine's own below each disk.

        With ``events`` what the tiers hold is told as it changes.
        """
        disk = None
        if self.disk:
            first, *more = (str(Path(path, folder)) for path in self.disk)
            codec, byte_codec = split_codec(self.disk_codec) if self.disk_codec else (None, None)
            disk = DiskConfig(
                first,
                self.disk_bytes,
                self.durability,
                self.disk_mode,
                policy=self.disk_policy,
                more_paths=tuple(more),
                admission=self.disk_admission,
                write_bytes_per_day=self.disk_write_bytes_per_day,
                codec=codec,
                byte_codec=byte_codec,
            )
        remotes = tuple(
            RemoteConfig(
                url, self.remote_bytes, mode=self.remote_mode, deadline_s=self.remote_deadline_s
            )
            for url in self.remote
        )
        return CacheConfig(
            dram_bytes=self.dram_bytes,
            disk=disk,
            remotes=remotes,
            codec=self.codec,
            policy=self.policy,
            slab_bytes=min(SLAB_BYTES_DEFAULT, self.dram_bytes or SLAB_BYTES_DEFAULT),
            workers=workers,
            shared=shared,
            load_deadline_s=self.load_deadline_s,
            pending_deadline_s=self.pending_deadline_s,
            gpu_time_worth=self.gpu_time_worth,
            tenant_quota_bytes=self.tenant_quota_bytes,
            events=events,
        )


def parse_options(table: Mapping[str, Any]) -> Options:
    """Read the options as JSON gives them.

    Sizes may be texts, ``disk`` and ``remote`` one text or several. Raises ``ConfigError`` that
    names the option, for an unknown name with the nearest one.
    """
    return read_table(Options, table, _WHERE, _SPELLED)
