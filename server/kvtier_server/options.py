"""Everything that the program can be told, from the command line and from a file in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvtier.config import Durability, from_table, parse_size, reject_unknown
from kvtier.constants import (
    DAEMON_CONFIG_BYTES_MAX,
    DAEMON_CONNECTIONS_MAX,
    DAEMON_DRAIN_S,
    DAEMON_IDLE_S_MAX,
)
from kvtier.errors import ConfigError, shortly

#: A text is no longer than a path may be.
_TEXT_MAX: Final = 4096
#: 2**32 - 1 stands for no user: chown(2).
_UID_MAX: Final = 2**32 - 2
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
#: A table of the file: how much single credentials may hold.
_QUOTAS: Final = "quotas"
_SIZES: Final = ("dram", "quota", "disk_write_bytes_per_day")
_SEVERAL: Final[tuple[str, ...]] = ("listen", "disk", "remote", "allow_uid")


@dataclass(frozen=True, slots=True)
class Options:
    """One field for each option, named with underscores. Texts are not looked into here."""

    listen: tuple[str, ...] = ()
    http: str | None = None
    dram: str = "4GiB"
    disk: tuple[str, ...] = ()
    disk_bytes: int = 100 << 30
    disk_admission: str = "everything"
    disk_write_bytes_per_day: str = "0"
    durability: str = Durability.NONE.value
    remote: tuple[str, ...] = ()
    remote_codec: str | None = None
    policy: str = "lru"
    quota: str = "0"
    token_file: str | None = None
    admin_token_file: str | None = None
    allow_uid: tuple[int, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    insecure: bool = False
    shared_memory: bool = True
    connections: int = DAEMON_CONNECTIONS_MAX
    idle_seconds: float = DAEMON_IDLE_S_MAX
    drain_seconds: float = DAEMON_DRAIN_S
    log_level: str = "warning"
    quotas: Mapping[str, int] = field(default_factory=dict)


_NAMES: Final = tuple(each.name for each in fields(Options))


def read_options(path: str | None, given: Mapping[str, Any]) -> Options:
    """Return what a file and the command line say together; the command line wins.

    ``given`` holds the options of the command line by their fields' names. Raises ``ConfigError``
    that names the option, for an unknown one with the nearest.
    """
    table = {} if path is None else _table(path)
    quotas = {} if path is None else _quotas(path, table.pop(_QUOTAS, {}))
    try:
        options = replace(from_table(Options, {**table, **given}), quotas=quotas)
    except ConfigError as error:
        name, separator, rest = str(error).partition(" = ")
        if not separator:
            name, separator, rest = str(error).partition(":")
        raise ConfigError(f"{_flag(name, path, given)}{separator}{rest}") from error
    for name in _NAMES:
        _check_texts(_flag(name, path, given), getattr(options, name))
    _check(options)
    return options


def _check_texts(where: str, value: object) -> None:
    """Refuse texts that name nothing, a path that no system call takes among them."""
    for text in value if isinstance(value, tuple) else (value,):
        fits = not isinstance(text, str) or (0 < len(text) <= _TEXT_MAX and "\0" not in text)
        if not fits:
            # There may be a password in a URL.
            shown = "(hidden)" if "://" in str(text) else shortly(text)
            allowed = f"a text of 1 to {_TEXT_MAX} characters without NUL"
            raise ConfigError(f"{where} = {shown}: allowed is {allowed}")


def _check(options: Options) -> None:
    for uid in options.allow_uid:
        if not 0 <= uid <= _UID_MAX:
            raise ConfigError(f"--allow-uid = {shortly(uid)}: allowed is 0 to {_UID_MAX}")
    if not 1 <= options.connections <= 65_536:
        raise ConfigError(f"--connections = {shortly(options.connections)}: allowed is 1 to 65536")
    if not 1 <= options.idle_seconds <= 86_400:
        raise ConfigError(f"--idle-seconds = {options.idle_seconds}: allowed is 1 to 86400")
    if not 0 <= options.drain_seconds <= 3600:
        raise ConfigError(f"--drain-seconds = {options.drain_seconds}: allowed is 0 to 3600")
    if options.log_level not in LOG_LEVELS:
        allowed = ", ".join(LOG_LEVELS)
        raise ConfigError(f"--log-level = {options.log_level!r}: allowed is {allowed}")


def _table(path: str) -> dict[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(DAEMON_CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--config = {path!r}: {error.strerror or error}") from error
    if len(data) > DAEMON_CONFIG_BYTES_MAX:
        raise ConfigError(f"--config = {path!r}: allowed are {DAEMON_CONFIG_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config = {path!r}: this is no TOML: {error}") from error
    reject_unknown(table, _NAMES, path)
    # A size may be a number, too, and one address, directory, URL or user no list.
    sizes = {name: str(table[name]) for name in _SIZES if type(table.get(name)) is int}
    several = {name: table[name] for name in _SEVERAL if name in table}
    single = {name: [value] for name, value in several.items() if not isinstance(value, list)}
    table |= {**sizes, **single}
    for url in table.get("remote", ()):
        _check_no_secret(path, url)
    return table


def _check_no_secret(path: str, url: object) -> None:
    try:
        secret = isinstance(url, str) and urlsplit(url).password is not None
    except ValueError:
        return  # It is no URL, which is told where it is opened.
    if secret:
        allowed = "a file of its own, as in redis://user@host?password_file=/run/secret"
        raise ConfigError(f"{path}: remote holds a password; allowed is {allowed}")


def _quotas(path: str, table: object) -> dict[str, int]:
    """Return the bytes that each credential may hold, as the file says."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {_QUOTAS} = {shortly(table)}: allowed is a table of sizes")
    quotas = {}
    for name, size in table.items():
        try:
            quotas[name] = parse_size(size)
        except ConfigError as error:
            raise ConfigError(f"{path}: {_QUOTAS}.{name}: {error}") from error
    return quotas


def _flag(name: str, path: str | None, given: Mapping[str, Any]) -> str:
    """Return an option's name as whoever set it has written it."""
    return f"--{name.replace('_', '-')}" if path is None or name in given else f"{path}: {name}"
