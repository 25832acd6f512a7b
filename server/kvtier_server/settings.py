"""The server's settings: addresses, whom it trusts, its cache. Parsed once, checked together."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier.config import CacheConfig, format_size
from kvtier.constants import (
    DAEMON_CONNECTIONS_MAX,
    DAEMON_DRAIN_S,
    DAEMON_IDLE_S_MAX,
)
from kvtier.errors import ConfigError
from kvtier_server.credentials import Door

_PORT: Final = re.compile(r"[0-9]{1,5}")
#: The longest path of a Unix socket: sun_path of unix(7) without its NUL.
_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True where only this machine can come from."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM: the server's certificate and key, and whose clients' certificates count."""

    cert: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return what the server needs. Raises ``ConfigError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            files = "--tls-cert, --tls-key, --client-ca"
            raise ConfigError(f"{files}: {error.strerror or error}") from error
        return context


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything that the program is told."""

    listen: tuple[Address, ...]
    cache: CacheConfig
    door: Door = field(repr=False)
    http: Address | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    connections_max: int = DAEMON_CONNECTIONS_MAX
    idle_s: float = DAEMON_IDLE_S_MAX
    drain_s: float = DAEMON_DRAIN_S

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a listener that anybody on a network could use."""
        if not self.listen:
            raise ConfigError("--listen is missing; allowed is host:port or unix:/path")
        names = [str(address) for address in self.listen if address.path or address.port]
        if len(set(names)) < len(names):
            raise ConfigError(f"--listen = {names}: allowed is each address once")
        for address in self.listen:
            self._check_trust("--listen", address, tls=self.tls)
        if self.http is not None:
            self._check_trust("--http", self.http, tls=None)

    def _check_trust(self, option: str, address: Address, *, tls: TlsFiles | None) -> None:
        trusted = self.door.tokens is not None or (tls is not None and tls.client_ca is not None)
        if not (address.loopback or trusted or self.insecure):
            raise ConfigError(
                f"{option} = '{address}': whoever reaches this address could read and write "
                "everything; allowed is a loopback address, --token-file"
                f"{', --client-ca' if option == '--listen' else ''}, or --insecure"
            )

    def shown(self) -> dict[str, Any]:
        """Return all settings that are no secret; secrets are told to be there."""
        disk = self.cache.disk
        tokens = self.door.tokens
        return {
            "listen": [str(address) for address in self.listen],
            "http": None if self.http is None else str(self.http),
            "dram": format_size(self.cache.dram_bytes),
            "disk": None if disk is None else list(disk.paths),
            "disk_bytes": None if disk is None else format_size(disk.capacity_bytes),
            # There may be a password in the rest of a URL.
            "remote": [f"{each.url.partition('://')[0]}://***" for each in self.cache.remotes],
            "policy": self.cache.policy,
            "quota_bytes": self.cache.tenant_quota_bytes,
            "tokens": "***" if tokens is not None else None,
            "credentials": [] if tokens is None else sorted(tokens.by_name),
            "uids": sorted(self.door.uids),
            "tls": None if self.tls is None else {"cert": self.tls.cert, "key": "***"},
            "client_ca": None if self.tls is None else self.tls.client_ca,
            "insecure": self.insecure,
            "connections_max": self.connections_max,
            "idle_s": self.idle_s,
            "drain_s": self.drain_s,
        }


def parse_address(option: str, text: str) -> Address:
    """Return an address: ``127.0.0.1:7070``, ``[::1]:7070``, ``unix:/run/kvtier.sock``.

    Raises ``ConfigError`` that names the option.
    """
    where = f"{option} = {text!r}"
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > _PATH_BYTES_MAX or "\0" in path:
            allowed = f"an absolute path of at most {_PATH_BYTES_MAX} bytes"
            raise ConfigError(f"{where}: allowed behind unix: is {allowed}")
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{where}: there is no folder {str(Path(path).parent)!r}")
        return Address(path=path)
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    well = separator and host and (bracketed or ":" not in host) and _PORT.fullmatch(port)
    if not well or int(port) > 65_535:
        more = " or unix:/path" if option == "--listen" else ""
        raise ConfigError(f"{where}: allowed is host:port{more}, as in 127.0.0.1:7070")
    return Address(host.strip("[]"), int(port))


def tls_files(cert: str | None, key: str | None, client_ca: str | None) -> TlsFiles | None:
    """Return what the three options say together. Raises ``ConfigError``."""
    given: Sequence[str | None] = (cert, key)
    if all(given):
        assert cert is not None
        assert key is not None
        return TlsFiles(cert, key, client_ca)
    if any(given) or client_ca is not None:
        raise ConfigError("--tls-cert, --tls-key: allowed is both, and with them --client-ca")
    return None
