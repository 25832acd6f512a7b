"""``kvtier daemon``: one process per host that owns tiers and serves many engines."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from kvtier.registry import import_problem
from kvtier_server.configure import configure
from kvtier_server.options import LOG_LEVELS, Options, read_options
from kvtier_server.settings import DaemonConfig

_Texts = list[str] | None
_Text = str | None


def _default(name: str) -> str:
    """Return an option's default, to be shown: the options themselves know them."""
    return str(getattr(Options(), name))


_Listen = Annotated[
    _Texts, typer.Option(metavar="HOST:PORT|unix:/PATH", help="Where to serve; repeatable.")
]
_Config = Annotated[
    _Text,
    typer.Option(
        metavar="FILE.toml",
        help="A file with any of these, named with underscores; what is given here wins.",
    ),
]
_Http = Annotated[
    _Text, typer.Option(metavar="HOST:PORT", help="Where operators look; default: nowhere")
]
_Dram = Annotated[
    _Text,
    typer.Option(metavar="SIZE", help="Memory for objects.", show_default=_default("dram")),
]
_Disk = Annotated[_Texts, typer.Option(metavar="PATH", help="A directory of its own; repeatable.")]
_DiskBytes = Annotated[
    _Text,
    typer.Option(
        metavar="SIZE",
        help="Most that lies on disk, in all directories.",
        show_default="100GiB",
    ),
]
_DiskAdmission = Annotated[
    _Text,
    typer.Option(
        metavar="NAME",
        help="What is written to disk.",
        show_default=_default("disk_admission"),
    ),
]
_DiskWriteBytesPerDay = Annotated[
    _Text,
    typer.Option(
        metavar="SIZE",
        help="Most that is written to disk in a day; 0: no bound.",
        show_default=_default("disk_write_bytes_per_day"),
    ),
]
_Durability = Annotated[
    _Text,
    typer.Option(
        metavar="LEVEL",
        help="When an object on disk survives a power failure: none, batch, each.",
        show_default=_default("durability"),
    ),
]
_Remote = Annotated[
    _Texts, typer.Option(metavar="URL", help="What to ask for what is not here; repeatable.")
]
_RemoteCodec = Annotated[
    _Text,
    typer.Option(metavar="NAME", help="zstd: what goes to remotes is compressed; default: as is"),
]
_Policy = Annotated[
    _Text,
    typer.Option(help="What leaves first, in every tier.", show_default=_default("policy")),
]
_Quota = Annotated[
    _Text,
    typer.Option(
        metavar="SIZE",
        help="Most that one credential may hold; 0: no bound.",
        show_default=_default("quota"),
    ),
]
_TokenFile = Annotated[
    _Text, typer.Option(metavar="FILE", help="Lines 'name token', or one token.")
]
_AdminTokenFile = Annotated[
    _Text, typer.Option(metavar="FILE", help="The token of whoever may change things by HTTP.")
]
_AllowUid = Annotated[
    list[int] | None, typer.Option(help="Another user who may use Unix sockets; repeatable.")
]
_TlsCert = Annotated[_Text, typer.Option(metavar="FILE", help="Serve TLS on TCP.")]
_TlsKey = Annotated[_Text, typer.Option(metavar="FILE", help="Its key.")]
_ClientCa = Annotated[
    _Text, typer.Option(metavar="FILE", help="Whose clients' certificates are asked for.")
]
_Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Trust whoever reaches an address.")
]
_SharedMemory = Annotated[
    bool | None,
    typer.Option(help="Let clients on Unix sockets map their objects; default: they may."),
]
_Connections = Annotated[
    int | None,
    typer.Option(help="Connections at a time.", show_default=_default("connections")),
]
_IdleSeconds = Annotated[
    float | None,
    typer.Option(
        help="After which a connection that wants nothing is closed.",
        show_default=_default("idle_seconds"),
    ),
]
_DrainSeconds = Annotated[
    float | None,
    typer.Option(
        help="For what runs when it is told to stop.", show_default=_default("drain_seconds")
    ),
]
_LogLevel = Annotated[
    _Text,
    typer.Option(
        help=f"How much is logged: {', '.join(LOG_LEVELS)}.", show_default=_default("log_level")
    ),
]


def daemon(
    listen: _Listen = None,
    config: _Config = None,
    http: _Http = None,
    dram: _Dram = None,
    disk: _Disk = None,
    disk_bytes: _DiskBytes = None,
    disk_admission: _DiskAdmission = None,
    disk_write_bytes_per_day: _DiskWriteBytesPerDay = None,
    durability: _Durability = None,
    remote: _Remote = None,
    remote_codec: _RemoteCodec = None,
    policy: _Policy = None,
    quota: _Quota = None,
    token_file: _TokenFile = None,
    admin_token_file: _AdminTokenFile = None,
    allow_uid: _AllowUid = None,
    tls_cert: _TlsCert = None,
    tls_key: _TlsKey = None,
    client_ca: _ClientCa = None,
    insecure: _Insecure = None,
    shared_memory: _SharedMemory = None,
    connections: _Connections = None,
    idle_seconds: _IdleSeconds = None,
    drain_seconds: _DrainSeconds = None,
    log_level: _LogLevel = None,
) -> None:
    """Serve a cache that many engines share, until SIGTERM or SIGINT. SIGHUP: read all anew."""
    told: dict[str, object] = {
        "listen": listen,
        "http": http,
        "dram": dram,
        "disk": disk,
        "disk_bytes": disk_bytes,
        "disk_admission": disk_admission,
        "disk_write_bytes_per_day": disk_write_bytes_per_day,
        "durability": durability,
        "remote": remote,
        "remote_codec": remote_codec,
        "policy": policy,
        "quota": quota,
        "token_file": token_file,
        "admin_token_file": admin_token_file,
        "allow_uid": allow_uid,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "client_ca": client_ca,
        "insecure": insecure,
        "shared_memory": shared_memory,
        "connections": connections,
        "idle_seconds": idle_seconds,
        "drain_seconds": drain_seconds,
        "log_level": log_level,
    }
    given = {name: value for name, value in told.items() if value not in (None, [])}
    read = partial(_read, config, given)
    settings = read()
    try:
        from kvtier_server.program import run_daemon
    except ImportError as error:
        raise import_problem(error, "kvtier daemon") from error
    run_daemon(settings, read, _say)


def _read(path: str | None, given: dict[str, object]) -> DaemonConfig:
    return configure(read_options(path, given))


def _say(text: str) -> None:
    """Say it if anybody reads: a closed pipe must not end a server, nor keep it from draining."""
    with suppress(OSError):
        typer.echo(text, err=True)
