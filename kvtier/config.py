"""Settings as frozen values: parsed once, checked at construction, unknown names refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from kvtier.config_checks import (
    SIZE_BYTES_MAX,
    check_paths,
    check_types,
    check_workers,
    require,
    whole,
)
from kvtier.constants import (
    ALIGN_BYTES,
    DIGEST_BYTES,
    GIB,
    KIB,
    LOAD_DEADLINE_S_DEFAULT,
    MIB,
    PENDING_DEADLINE_S_DEFAULT,
    REMOTE_ABSENT_S_DEFAULT,
    REMOTE_CONNECTIONS_DEFAULT,
    REMOTE_CONNECTIONS_MAX,
    REMOTE_DEADLINE_S_DEFAULT,
    REMOTE_TTL_S_DEFAULT,
    SLAB_BYTES_DEFAULT,
    STAGING_BYTES,
)
from kvtier.errors import ConfigError, nearest, shortly
from kvtier.types import Placement

_UNITS: Final = {"": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": KIB * GIB}
# Of so many digits as no size has, Python makes no number.
_SIZE: Final = re.compile(r"([0-9]{1,64}) ?([A-Za-z]*)")
_SIZE_ALLOWED: Final = "a whole number of bytes, KiB, MiB, GiB or TiB, as in 123, 512MiB, '10 GiB'"

ConfigT = TypeVar("ConfigT")


class Durability(StrEnum):
    """When a chunk on disk survives a power failure.

    ``none``: when the system writes it; checksums find what was torn. ``batch``: within a group
    commit. ``each``: before the write is reported as done.
    """

    NONE = "none"
    BATCH = "batch"
    EACH = "each"


class WriteMode(StrEnum):
    """``through`` writes to disk when a chunk is stored, ``back`` when DRAM runs short."""

    THROUGH = "through"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier: directories of its own, the most bytes it may take, what it writes when.

    Several directories, each on a device of its own, share ``capacity_bytes`` equally. What is
    written is chosen by ``admission`` and bounded by ``write_bytes_per_day`` (0: no bound). With
    a ``codec`` of its own, what is written through is packed from the pool for it; a
    ``byte_codec`` then encodes what is written, whatever packed it.
    """

    path: str
    capacity_bytes: int = 10 * GIB
    durability: Durability = Durability.NONE
    mode: WriteMode = WriteMode.THROUGH
    policy: str = "lru"
    more_paths: tuple[str, ...] = ()
    admission: str = "everything"
    write_bytes_per_day: int = 0
    codec: str | None = None
    byte_codec: str | None = None

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a field that cannot be."""
        check_types(self, "disk.")
        require(bool(self.path), "disk.path", self.path, "a directory")
        for name in ("capacity_bytes", "write_bytes_per_day"):
            whole(f"disk.{name}", getattr(self, name))
        require(
            self.capacity_bytes >= ALIGN_BYTES,
            "disk.capacity_bytes",
            self.capacity_bytes,
            f"at least {ALIGN_BYTES}",
        )
        require(bool(self.policy), "disk.policy", self.policy, "a policy's name")
        require(self.codec != "", "disk.codec", self.codec, "a codec's name")
        require(self.byte_codec != "", "disk.byte_codec", self.byte_codec, "a byte codec's name")
        require(bool(self.admission), "disk.admission", self.admission, "an admission's name")
        check_paths(self.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """All directories, the first one first."""
        return (self.path, *self.more_paths)


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may hold: ``tenant`` is ``kvtier.keys.tenant_digest`` in hexadecimal.

    A quota of 0 is no bound, where ``CacheConfig.tenant_quota_bytes`` bounds the others.
    """

    tenant: str
    quota_bytes: int

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a field that cannot be."""
        check_types(self, "tenant_quotas.")
        allowed = f"{2 * DIGEST_BYTES} hexadecimal digits, in lower case"
        fits = re.fullmatch(r"[0-9a-f]+", self.tenant) and len(self.tenant) == 2 * DIGEST_BYTES
        require(bool(fits), "tenant_quotas.tenant", self.tenant, allowed)
        whole("tenant_quotas.quota_bytes", self.quota_bytes)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A remote tier: a connector's URL, and how this cache uses it.

    With ``capacity_bytes`` this cache is the only writer, and bounds what lies there; 0: others
    write there too, and the store bounds itself. What it said to hold is believed for ``ttl_s``,
    what it said to lack for ``absent_s``; ``ttl_s`` is at most the store's own expiry, if it has
    one. At most ``connections`` calls are out at a time; one that takes longer than ``deadline_s``
    is a fault. A ``byte_codec`` encodes what is written, whatever packed it. The rest is as for the
    disk.
    """

    url: str = field(repr=False)  # It may hold a password.
    capacity_bytes: int = 0
    ttl_s: float = REMOTE_TTL_S_DEFAULT
    absent_s: float = REMOTE_ABSENT_S_DEFAULT
    mode: WriteMode = WriteMode.THROUGH
    policy: str = "lru"
    admission: str = "everything"
    write_bytes_per_day: int = 0
    connections: int = REMOTE_CONNECTIONS_DEFAULT
    deadline_s: float = REMOTE_DEADLINE_S_DEFAULT
    byte_codec: str | None = None

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a field that cannot be. No message holds the URL."""
        check_types(self, "remotes.")
        require("://" in self.url, "remotes.url", "(hidden)", "a URL, as in redis://host")
        whole("remotes.capacity_bytes", self.capacity_bytes)
        whole("remotes.write_bytes_per_day", self.write_bytes_per_day)
        require(bool(self.policy), "remotes.policy", self.policy, "a policy's name")
        require(bool(self.admission), "remotes.admission", self.admission, "an admission's name")
        encodes = self.byte_codec != ""
        require(encodes, "remotes.byte_codec", self.byte_codec, "a byte codec's name")
        count = self.connections
        allowed = 1 <= count <= REMOTE_CONNECTIONS_MAX
        require(allowed, "remotes.connections", count, f"1 .. {REMOTE_CONNECTIONS_MAX}")
        for name in ("ttl_s", "absent_s", "deadline_s"):
            seconds = getattr(self, name)
            well = math.isfinite(seconds) and seconds > 0
            require(well, f"remotes.{name}", seconds, "more than 0")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache: its tiers, their policy, the codec, and which workers hold the pool.

    ``dram_bytes`` and ``disk.capacity_bytes`` bound the whole cache, whatever the number of
    workers. ``dram_bytes`` 0: no DRAM tier, only ``STAGING_BYTES`` that chunks pass through.
    ``shared`` maps the arena so that workers in other processes reach it. Otherwise,
    ``exported_to`` cuts it into files, one for each tenant's processes to map, and names the tenant
    to whom all of it is given at first; empty: it is one piece. A load is cut off after
    ``load_deadline_s``; a lookup waits at most ``pending_deadline_s`` for a slow tier. A second of
    computing is worth ``gpu_time_worth`` seconds of waiting for a load.
    ``remotes`` are asked in their order, for what is in neither DRAM nor disk.
    With ``events``, what the tiers hold is told as it changes. A tenant may hold
    ``tenant_quota_bytes`` in all tiers together (0: no bound), or what ``tenant_quotas`` says.
    """

    dram_bytes: int
    disk: DiskConfig | None = None
    remotes: tuple[RemoteConfig, ...] = ()
    codec: str = "raw"
    policy: str = "lru"
    slab_bytes: int = SLAB_BYTES_DEFAULT
    workers: tuple[Placement, ...] = (Placement(),)
    shared: bool = False
    exported_to: str = ""
    load_deadline_s: float = LOAD_DEADLINE_S_DEFAULT
    pending_deadline_s: float = PENDING_DEADLINE_S_DEFAULT
    gpu_time_worth: float = 1.0
    tenant_quota_bytes: int = 0
    tenant_quotas: tuple[TenantQuota, ...] = ()
    events: bool = False

    @property
    def disk_codec(self) -> str | None:
        """The codec that packs for the disk, where that is not the one of DRAM."""
        own = self.disk.codec if self.disk is not None else None
        return own if own != self.codec else None

    @property
    def arena_bytes(self) -> int:
        """The memory that shards pass through: the DRAM tier, or without one a staging area."""
        return self.dram_bytes or STAGING_BYTES

    @property
    def codecs(self) -> tuple[str, ...]:
        """All codecs that pack what is stored."""
        return (self.codec, *([self.disk_codec] if self.disk_codec else []))

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a field that cannot be or that contradicts another."""
        check_types(self)
        for name in ("dram_bytes", "slab_bytes", "tenant_quota_bytes"):
            whole(name, getattr(self, name))
        tenants = [quota.tenant for quota in self.tenant_quotas]
        once = len(set(tenants)) == len(tenants)
        require(once, "tenant_quotas.tenant", tenants, "each tenant once")
        require(bool(self.codec), "codec", self.codec, "a codec's name")
        require(bool(self.policy), "policy", self.policy, "a policy's name")
        require(
            self.slab_bytes > 0 and self.slab_bytes % ALIGN_BYTES == 0,
            "slab_bytes",
            self.slab_bytes,
            f"a positive multiple of {ALIGN_BYTES}",
        )
        self._check_dram()
        alone = not (self.shared and self.exported_to)
        require(alone, "exported_to", self.exported_to, "none where shared")
        for name in ("load_deadline_s", "pending_deadline_s", "gpu_time_worth"):
            seconds = getattr(self, name)
            require(math.isfinite(seconds) and seconds > 0, name, seconds, "more than 0")
        check_workers(self.workers)

    def _check_dram(self) -> None:
        below = bool(self.disk or self.remotes)
        staged = self.dram_bytes == 0 and below and not self.exported_to  # Others map a tier.
        slab = format_size(self.slab_bytes)
        require(
            staged or self.dram_bytes >= self.slab_bytes,
            "dram_bytes",
            self.dram_bytes,
            f"at least one slab ({slab}), or 0 with a disk or a remote",
        )
        modes = [("remotes.mode", remote.mode) for remote in self.remotes]
        modes += [("disk.mode", self.disk.mode)] if self.disk else []
        for name, mode in modes:
            now = not staged or mode is WriteMode.THROUGH
            require(now, name, mode.value, "through, where dram_bytes is 0: nothing waits there")


def parse_size(text: str | int) -> int:
    """Return bytes: ``512MiB``, ``10 KiB``, ``123``. Binary units only, no fractions.

    >>> parse_size("1GiB")
    1073741824
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= SIZE_BYTES_MAX:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        hint = nearest(match[2], _UNITS) if match else ""
        raise ConfigError(f"not a size: {shortly(text)}{hint}; allowed: {_SIZE_ALLOWED}")
    nbytes = int(match[1]) * _UNITS[match[2]]
    if nbytes > SIZE_BYTES_MAX:
        raise ConfigError(f"not a size: {shortly(text)}; allowed: less than {2**23} TiB")
    return nbytes


def format_size(nbytes: int) -> str:
    """Return a size to read, in the largest unit it fills: ``1.5 GiB``, ``100 B``.

    >>> format_size(1536)
    '1.5 KiB'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit]:
            return f"{round(nbytes / _UNITS[unit], 1):g} {unit}"
    return f"{nbytes} B"


def from_table(config: type[ConfigT], table: Mapping[str, Any], where: str = "") -> ConfigT:
    """Build a config dataclass from a table as TOML or JSON give it.

    Sizes (fields named ``*_bytes``) may be texts, enums are given by value, nested configs are
    tables. Raises ``ConfigError`` that names the field, for an unknown name with the nearest one.
    """
    assert is_dataclass(config), f"{config} is no dataclass"
    hints = get_type_hints(config)
    names = [field.name for field in fields(config)]
    reject_unknown(table, names, where or "the configuration")
    prefix = f"{where}." if where else ""
    values = {name: _convert(hints[name], prefix + name, table[name]) for name in table}
    try:
        return config(**values)
    except TypeError as error:
        raise ConfigError(f"{where or 'the configuration'}: {error}") from error


def url_options(url: str, allowed: Iterable[str]) -> dict[str, str]:
    """Return the options behind a URL's ``?``. An unknown or repeated one is a ``ConfigError``."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    reject_unknown(options, allowed, f"a {parts.scheme}:// URL")
    if len(options) < len(pairs):
        raise ConfigError(f"an option of a {parts.scheme}:// URL is given twice")
    return options


def reject_unknown(names: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ``ConfigError`` for the first name that is not allowed, with the nearest that is."""
    known = list(allowed)
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            hint = nearest(name, known)
            raise ConfigError(f"{where} has no {name!r}{hint}; allowed: {listed}")


def _convert(hint: Any, name: str, value: Any) -> Any:
    """Turn a table's value into what the field holds, or raise ``ConfigError``."""
    if isinstance(hint, UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
    if get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), name, value, "a list")
        return tuple(_convert(get_args(hint)[0], name, item) for item in value)
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, hint):
            return value
        require(isinstance(value, Mapping), name, value, "a table")
        return from_table(hint, value, name)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        known = [member.value for member in hint]
        near = nearest(value, known) if isinstance(value, str) else ""
        require(value in known, name, value, ", ".join(known) + near)
        return hint(value)
    if name.endswith("_bytes"):
        return _named(parse_size, name, value)
    if hint is float and type(value) is int:
        require(abs(value) <= sys.float_info.max, name, value, "a number that a float holds")
        return float(value)
    require(type(value) is hint, name, value, f"a {hint.__name__}")
    return value


def _named(parse: Callable[[Any], int], name: str, value: Any) -> int:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
