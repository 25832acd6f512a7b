"""What a Redis URL says. Pure, but for the file that may hold the password."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvtier.config import url_options
from kvtier.errors import ConfigError

PORT_DEFAULT: Final = 6379
SENTINEL_PORT_DEFAULT: Final = 26379
CONNECTIONS_MAX: Final = 64
TTL_S_MAX: Final = 10 * 365 * 86_400
PREFIX_DEFAULT: Final = "kvtier:"

OPTIONS: Final = (
    "ca",
    "cert",
    "connect_timeout_s",
    "connections",
    "db",
    "hostname",
    "key",
    "password_file",
    "prefix",
    "sentinel_password_file",
    "sentinel_username",
    "service",
    "timeout_s",
    "ttl_s",
)


class Kind(StrEnum):
    """How the servers behind a URL hang together: what stands between ``redis+`` and ``://``."""

    SERVER = ""
    UNIX = "unix"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


class Node(NamedTuple):
    """One server: host and port, or the path of its Unix socket and 0."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password; never shown."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: whom we trust (the system's authorities if None), and who we are, if asked."""

    ca: str | None
    cert: str | None
    key: str | None
    check_hostname: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a URL says. ``nodes`` are where to begin; a cluster has more."""

    kind: Kind
    nodes: tuple[Node, ...]
    login: Login = field(default_factory=Login)
    sentinel_login: Login = field(default_factory=Login)
    tls: Tls | None = None
    service: str = ""
    database: int = 0
    prefix: bytes = PREFIX_DEFAULT.encode()
    ttl_s: int | None = None
    connections: int = 4
    timeout_s: float = 5.0
    connect_timeout_s: float = 2.0


def parse_url(url: str) -> Settings:
    """Return what the URL says. Raises ``ConfigError`` that never holds the password."""
    parts = urlsplit(url)
    scheme, _, kind_name = parts.scheme.partition("+")
    kind = Kind(kind_name)
    _check_password(kind, parts)
    options = url_options(url, OPTIONS)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    _require(
        (kind is Kind.SENTINEL) == ("service" in options), "service", "sentinels, and with them"
    )
    prefix = options.get("prefix", PREFIX_DEFAULT)
    if "{" in prefix or "}" in prefix:
        raise ConfigError(f"prefix is {prefix!r}; braces mean something to a cluster")
    database = options.get("db") or (parts.path.strip("/") if kind is not Kind.UNIX else "")
    return Settings(
        kind=kind,
        nodes=_nodes(kind, hosts, unquote(parts.path)),
        login=_login(userinfo, options.get("password_file")),
        sentinel_login=Login(
            options.get("sentinel_username"), _secret(options.get("sentinel_password_file"))
        ),
        tls=_tls(scheme == "rediss", options),
        service=options.get("service", ""),
        database=int(_number("the database", database or "0", 0, 65_535)),
        prefix=prefix.encode(),
        ttl_s=int(_number("ttl_s", options["ttl_s"], 1, TTL_S_MAX)) if "ttl_s" in options else None,
        connections=int(
            _number("connections", options.get("connections", "4"), 1, CONNECTIONS_MAX)
        ),
        timeout_s=_number("timeout_s", options.get("timeout_s", "5"), 0.001, 3600),
        connect_timeout_s=_number(
            "connect_timeout_s", options.get("connect_timeout_s", "2"), 0.001, 3600
        ),
    )


def _check_password(kind: Kind, parts: SplitResult) -> None:
    """Refuse one that ends the host for whoever reads the URL: other messages would show of it."""
    if "@" in parts.netloc:
        return
    path = parts.path if kind is not Kind.UNIX else ""
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    _, separator, port = parts.netloc.rpartition(":")
    no_port = separator and not port.endswith("]") and not port.isdecimal()
    if "@" in "".join([path, parts.fragment, *names, parts.query if no_port else ""]):
        raise ConfigError(
            "in the password of a Redis URL / ? and # are written as %2F, %3F and %23, or it lies "
            "in password_file"
        )


def _nodes(kind: Kind, hosts: str, path: str) -> tuple[Node, ...]:
    if kind is Kind.UNIX:
        if hosts or not path:
            raise ConfigError("a redis+unix:// URL has three slashes: redis+unix:///run/redis.sock")
        return (Node(path, 0),)
    port = SENTINEL_PORT_DEFAULT if kind is Kind.SENTINEL else PORT_DEFAULT
    nodes = tuple(_node(host, port) for host in hosts.split(",") if host)
    if not nodes:
        raise ConfigError("a Redis URL names a host: redis://host:6379")
    if kind is Kind.SERVER and len(nodes) > 1:
        raise ConfigError("several hosts are a redis+cluster:// or redis+sentinel:// URL")
    return nodes


def _node(text: str, port_default: int) -> Node:
    host, separator, port = text.rpartition(":")
    if not separator or port.endswith("]"):
        host, port = text, str(port_default)
    return Node(host.strip("[]"), int(_number("the port", port, 1, 65_535)))


def _login(userinfo: str, password_file: str | None) -> Login:
    username, separator, password = userinfo.partition(":")
    if separator and password_file is not None:
        raise ConfigError("a password is in the URL or in password_file, not in both")
    secret = unquote(password) if separator else _secret(password_file)
    return Login(unquote(username) or None, secret)


def _secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"password file {path}: {error.strerror}") from error


def _tls(wanted: bool, options: Mapping[str, str]) -> Tls | None:  # noqa: FBT001
    for name in ("ca", "cert", "key", "hostname"):
        _require(wanted or name not in options, name, "rediss://")
    _require(("cert" in options) == ("key" in options), "cert", "key, and the other way round")
    hostname = options.get("hostname", "check")
    if hostname not in {"check", "any"}:
        raise ConfigError(f"hostname is {hostname!r}; allowed: any, check")
    if not wanted:
        return None
    return Tls(options.get("ca"), options.get("cert"), options.get("key"), hostname == "check")


def _require(condition: bool, name: str, needs: str) -> None:  # noqa: FBT001
    if not condition:
        raise ConfigError(f"the option {name} of a Redis URL is for {needs}")


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{name} of a Redis URL is {text!r}; allowed is {low:g} to {high:g}")
    return value
