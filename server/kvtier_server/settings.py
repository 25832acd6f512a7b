"""The server's settings: addresses, whom it trusts, its cache. Parsed once, checked together."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
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
from kvtier_server.credentials import Door, Tokens

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
        self.renew(context)
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise ConfigError(
                    f"--client-ca = {self.client_ca!r}: {error.strerror or error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Have a context show what the files hold now to whoever connects from now on.

        Raises ``ConfigError``.
        """
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            files = f"--tls-cert = {self.cert!r}, --tls-key = {self.key!r}"
            raise ConfigError(f"{files}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything that the program is told.

    With ``operators`` only their tokens may change anything by HTTP. ``quotas`` are those of single
    credentials, in place of ``quota_bytes``; 0 is none.
    """

    listen: tuple[Address, ...]
    cache: CacheConfig
    door: Door = field(repr=False)
    http: Address | None = None
    operators: Tokens | None = field(default=None, repr=False)
    quota_bytes: int = 0
    quotas: Mapping[str, int] = field(default_factory=dict)
    tls: TlsFiles | None = None
    insecure: bool = False
    shared_memory: bool = True
    connections_max: int = DAEMON_CONNECTIONS_MAX
    idle_s: float = DAEMON_IDLE_S_MAX
    drain_s: float = DAEMON_DRAIN_S
    log_level: str = "warning"

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a listener that anybody on a network could use."""
        if not self.listen:
            raise ConfigError("--listen is missing; allowed is host:port or unix:/path")
        names = [str(address) for address in self.listen if address.path or address.port]
        if len(set(names)) < len(names):
            raise ConfigError(f"--listen = {names}: allowed is each address once")
        trusted = self.door.tokens is not None or self.door.certificates
        for address in self.listen:
            self._check_trust("--listen", address, trusted, "--token-file, --client-ca")
        if self.http is not None:
            trusted = self.door.tokens is not None or self.operators is not None
            self._check_trust("--http", self.http, trusted, "--token-file, --admin-token-file")

    def _check_trust(self, option: str, address: Address, trusted: bool, ways: str) -> None:  # noqa: FBT001
        if not (address.loopback or trusted or self.insecure):
            raise ConfigError(
                f"{option} = '{address}': whoever reaches this address could read and write "
                f"everything; allowed is a loopback address, {ways}, or --insecure"
            )

    @property
    def http_tls(self) -> TlsFiles | None:
        """What operators are served with: beyond this machine no token goes as it is, if it can."""
        if self.tls is None or self.http is None or self.http.loopback:
            return None
        return TlsFiles(self.tls.cert, self.tls.key)

    @property
    def socket_mode(self) -> int:
        """The mode of Unix sockets: the door decides, where others may come."""
        return 0o666 if self.door.uids else 0o600

    def fixed(self) -> dict[str, object]:
        """Return what cannot change while the server runs, by option."""
        cache, tls, disk = self.cache, self.tls, self.cache.disk
        return {
            "listen": self.listen,
            "http": self.http,
            "dram": cache.dram_bytes,
            "disk": None if disk is None else disk.paths,
            "disk_bytes": None if disk is None else disk.capacity_bytes,
            "disk_admission": None if disk is None else disk.admission,
            "disk_write_bytes_per_day": None if disk is None else disk.write_bytes_per_day,
            "durability": None if disk is None else disk.durability,
            "remote": tuple(remote.url for remote in cache.remotes),
            "remote_codec": _remote_codec(cache),
            "policy": cache.policy,
            "tls_cert": None if tls is None else tls.cert,
            "tls_key": None if tls is None else tls.key,
            "client_ca": None if tls is None else tls.client_ca,
            "insecure": self.insecure,
            "shared_memory": self.shared_memory,
        }

    def live(self) -> dict[str, object]:
        """Return what can, by option; secrets are among it."""
        return {
            "quota": self.quota_bytes,
            "quotas": dict(self.quotas),
            "token_file": self.door.tokens,
            "admin_token_file": self.operators,
            "allow_uid": set(self.door.uids),
            "connections": self.connections_max,
            "idle_seconds": self.idle_s,
            "drain_seconds": self.drain_s,
            "log_level": self.log_level,
        }

    def shown(self, may_see: Callable[[str], bool] = bool) -> dict[str, Any]:
        """Return all settings that are no secret; secrets are told to be there.

        Of credentials those are named that ``may_see`` tells of.
        """
        disk = self.cache.disk
        tokens = self.door.tokens
        return {
            "listen": [str(address) for address in self.listen],
            "http": None if self.http is None else str(self.http),
            "dram": format_size(self.cache.dram_bytes),
            "disk": None if disk is None else list(disk.paths),
            "disk_bytes": None if disk is None else format_size(disk.capacity_bytes),
            "disk_admission": None if disk is None else disk.admission,
            "disk_write_bytes_per_day": None if disk is None else disk.write_bytes_per_day,
            "durability": None if disk is None else disk.durability.value,
            # There may be a password in the rest of a URL.
            "remote": [f"{each.url.partition('://')[0]}://***" for each in self.cache.remotes],
            "remote_codec": _remote_codec(self.cache),
            "policy": self.cache.policy,
            "quota_bytes": self.quota_bytes,
            "quotas": {name: size for name, size in self.quotas.items() if may_see(name)},
            "tokens": "***" if tokens is not None else None,
            "admin_tokens": "***" if self.operators is not None else None,
            "credentials": [] if tokens is None else sorted(filter(may_see, tokens.by_name)),
            "uids": sorted(self.door.uids),
            "tls": None if self.tls is None else {"cert": self.tls.cert, "key": "***"},
            "client_ca": None if self.tls is None else self.tls.client_ca,
            "insecure": self.insecure,
            "shared_memory": self.shared_memory,
            "connections_max": self.connections_max,
            "idle_s": self.idle_s,
            "drain_s": self.drain_s,
            "log_level": self.log_level,
        }


def _remote_codec(cache: CacheConfig) -> str | None:
    """Return what encodes what goes to remotes, all of them alike."""
    return cache.remotes[0].byte_codec if cache.remotes else None


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
