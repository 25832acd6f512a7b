"""From what the program was told to settings: texts parsed, files of secrets read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.cache.below.encoder import named_encoder
from kvtier.config import CacheConfig, DiskConfig, Durability, RemoteConfig, parse_size
from kvtier.errors import ConfigError, MissingExtraError, RegistryError, nearest
from kvtier.registry import admissions, connectors, policies, split_scheme
from kvtier_server.credentials import Door, Tokens, is_credential, read_tokens
from kvtier_server.options import Options
from kvtier_server.settings import DaemonConfig, parse_address, tls_files

#: A server below a server would be asked for what it asks for.
_OWN: Final = ("kvtier", "kvtiers", "kvtier+unix")
_OF_DISK: Final = ("disk_bytes", "disk_admission", "disk_write_bytes_per_day", "durability")
#: How settings of the cache are named on the command line.
_OPTIONS: Final = {
    "dram_bytes": "--dram",
    "disk.path": "--disk",
    "disk.more_paths": "--disk",
    "disk.capacity_bytes": "--disk-bytes",
    "policy": "--policy",
    "disk.policy": "--policy",
}


def configure(options: Options) -> DaemonConfig:
    """Return the settings that options stand for. Raises ``ConfigError`` that names the option."""
    for name in options.quotas:
        if not is_credential(name):
            raise ConfigError(f"quotas: {name!r} can be no credential's name")
    tokens = None if options.token_file is None else read_tokens(options.token_file)
    return DaemonConfig(
        listen=tuple(parse_address("--listen", each) for each in options.listen),
        http=None if options.http is None else parse_address("--http", options.http),
        cache=_cache_config(options),
        door=Door(tokens, frozenset(options.allow_uid), certificates=bool(options.client_ca)),
        operators=_operators(options.admin_token_file),
        quota_bytes=_size("--quota", options.quota),
        quotas=dict(options.quotas),
        tls=tls_files(options.tls_cert, options.tls_key, options.client_ca),
        insecure=options.insecure,
        shared_memory=options.shared_memory,
        connections_max=options.connections,
        idle_s=options.idle_seconds,
        drain_s=options.drain_seconds,
        log_level=options.log_level,
    )


def _operators(path: str | None) -> Tokens | None:
    return None if path is None else read_tokens(path, "--admin-token-file")


def _cache_config(options: Options) -> CacheConfig:
    for url in options.remote:
        _check_remote(url)
    _check_remote_codec(options)
    _check_disk(options)
    policy, dram_bytes = options.policy, _size("--dram", options.dram)
    _check_known("--policy", policy, policies.names())
    try:
        return CacheConfig(
            dram_bytes,
            _disk_config(options) if options.disk else None,
            remotes=tuple(
                RemoteConfig(url, policy=policy, byte_codec=options.remote_codec)
                for url in options.remote
            ),
            policy=policy,
        )
    except ConfigError as error:
        name, separator, rest = str(error).partition(" = ")
        raise ConfigError(f"{_OPTIONS.get(name, name)}{separator}{rest}") from error


def _disk_config(options: Options) -> DiskConfig:
    try:
        first, *more = [str(Path(path).expanduser()) for path in options.disk]
    except RuntimeError as error:
        raise ConfigError(f"--disk = {list(options.disk)}: {error}") from error
    _check_known("--disk-admission", options.disk_admission, admissions.names())
    _check_known("--durability", options.durability, [each.value for each in Durability])
    return DiskConfig(
        first,
        options.disk_bytes,
        Durability(options.durability),
        policy=options.policy,
        more_paths=tuple(more),
        admission=options.disk_admission,
        write_bytes_per_day=_size("--disk-write-bytes-per-day", options.disk_write_bytes_per_day),
    )


def _check_disk(options: Options) -> None:
    """Refuse what is said of a disk where there is none."""
    for name in _OF_DISK if not options.disk else ():
        value = getattr(options, name)
        if value != getattr(Options(), name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} = {value!r}: allowed is with --disk alone")


def _check_known(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        allowed = f"{', '.join(known)}{nearest(name, known)}"
        raise ConfigError(f"{option} = {name!r}: allowed is {allowed}")


def _check_remote(url: str) -> None:
    """Refuse what is no connector's, without showing the rest of a URL."""
    scheme, separator, _ = url.partition("://")
    known = [name for name in connectors.names() if name not in _OWN]
    if not separator or split_scheme(scheme)[1] not in known:
        shown = scheme if separator else "(hidden)"
        allowed = f"URLs that start with one of {', '.join(known)}, and ://"
        hint = nearest(split_scheme(scheme)[1], known) if separator else ""
        raise ConfigError(f"--remote = {shown!r}: allowed are {allowed}{hint}")


def _check_remote_codec(options: Options) -> None:
    """Refuse what encodes nothing, or is not installed."""
    name = options.remote_codec
    if name is None:
        return
    if not options.remote:
        raise ConfigError(f"--remote-codec = {name!r}: allowed is with --remote alone")
    try:
        named_encoder(name)
    except (RegistryError, MissingExtraError) as error:
        raise ConfigError(f"--remote-codec = {name!r}: {error}") from error


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option} = {text!r}: {error}") from error
