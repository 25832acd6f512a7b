"""``kvtier daemon``: one process per host that owns tiers and serves many engines."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.config import CacheConfig, DiskConfig, RemoteConfig, parse_size
from kvtier.constants import DAEMON_CONNECTIONS_MAX, DAEMON_DRAIN_S
from kvtier.errors import ConfigError
from kvtier.registry import connectors, import_problem, split_scheme
from kvtier_server.credentials import Door, read_tokens
from kvtier_server.settings import DaemonConfig, parse_address, tls_files

#: A server below a server would be asked for what it asks for.
_OWN: Final = ("kvtier", "kvtiers", "kvtier+unix")
#: How settings of the cache are named on the command line.
_OPTIONS: Final = {
    "dram_bytes": "--dram",
    "disk.path": "--disk",
    "disk.more_paths": "--disk",
    "disk.capacity_bytes": "--disk-bytes",
    "tenant_quota_bytes": "--quota",
    "policy": "--policy",
    "disk.policy": "--policy",
}
_Paths = list[str] | None


def daemon(
    listen: Annotated[
        list[str], typer.Option(metavar="HOST:PORT|unix:/PATH", help="Where to serve; repeatable.")
    ],
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where operators look; default: nowhere")
    ] = None,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="Memory for objects.")] = "4GiB",
    disk: Annotated[
        _Paths, typer.Option(metavar="PATH", help="A directory of its own; repeatable.")
    ] = None,
    disk_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Most that lies on disk, in all directories.")
    ] = "100GiB",
    remote: Annotated[
        _Paths, typer.Option(metavar="URL", help="What to ask for what is not here; repeatable.")
    ] = None,
    policy: Annotated[str, typer.Option(help="What leaves first, in every tier.")] = "lru",
    quota: Annotated[
        str, typer.Option(metavar="SIZE", help="Most that one credential may hold; 0: no bound.")
    ] = "0",
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Lines 'name token', or one token.")
    ] = None,
    allow_uid: Annotated[
        list[int] | None, typer.Option(help="Another user who may use Unix sockets; repeatable.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Serve TLS on TCP.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    client_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Whose clients' certificates are asked for.")
    ] = None,
    insecure: Annotated[  # noqa: FBT002
        bool, typer.Option("--insecure", help="Trust whoever reaches an address.")
    ] = False,
    connections: Annotated[
        int, typer.Option(min=1, max=65_536, help="Connections at a time.")
    ] = DAEMON_CONNECTIONS_MAX,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="For what runs when it is told to stop.")
    ] = DAEMON_DRAIN_S,
) -> None:
    """Serve a cache that many engines share, until SIGTERM or SIGINT."""
    config = DaemonConfig(
        listen=tuple(parse_address("--listen", each) for each in listen),
        http=None if http is None else parse_address("--http", http),
        cache=_cache_config(dram, disk or [], disk_bytes, remote or [], policy, quota),
        door=Door(
            None if token_file is None else read_tokens(token_file), frozenset(allow_uid or ())
        ),
        tls=tls_files(tls_cert, tls_key, client_ca),
        insecure=insecure,
        connections_max=connections,
        drain_s=drain_seconds,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        from kvtier_server.program import run_daemon
    except ImportError as error:
        raise import_problem(error, "kvtier daemon") from error
    run_daemon(config, _say)


def _say(text: str) -> None:
    """Say it if anybody reads: a closed pipe must not end a server, nor keep it from draining."""
    with suppress(OSError):
        typer.echo(text, err=True)


def _cache_config(
    dram: str, disk: list[str], disk_bytes: str, remote: list[str], policy: str, quota: str
) -> CacheConfig:
    for url in remote:
        _check_remote(url)
    dram_bytes, quota_bytes = _size("--dram", dram), _size("--quota", quota)
    try:
        return CacheConfig(
            dram_bytes,
            _disk_config(disk, _size("--disk-bytes", disk_bytes), policy) if disk else None,
            remotes=tuple(RemoteConfig(url, policy=policy) for url in remote),
            policy=policy,
            tenant_quota_bytes=quota_bytes,
        )
    except ConfigError as error:
        name, separator, rest = str(error).partition(" = ")
        raise ConfigError(f"{_OPTIONS.get(name, name)}{separator}{rest}") from error


def _disk_config(disk: list[str], capacity_bytes: int, policy: str) -> DiskConfig:
    paths = [str(Path(path).expanduser()) for path in disk]
    return DiskConfig(paths[0], capacity_bytes, more_paths=tuple(paths[1:]), policy=policy)


def _check_remote(url: str) -> None:
    """Refuse what is no connector's, without showing the rest of a URL."""
    scheme, separator, _ = url.partition("://")
    known = [name for name in connectors.names() if name not in _OWN]
    if not separator or split_scheme(scheme)[1] not in known:
        shown = scheme if separator else "(hidden)"
        allowed = f"URLs that start with {', '.join(known)} and ://"
        raise ConfigError(f"--remote = {shown!r}: allowed are {allowed}")


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option} = {text!r}: {error}") from error
