"""What an S3 URL says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from botocore.config import Config

from kvtier.config import url_options
from kvtier.constants import MIB
from kvtier.errors import ConfigError, nearest

CONNECTIONS_MAX: Final = 128
TRIES_MAX: Final = 10
_SWITCH: Final = {"yes": True, "no": False}

OPTIONS: Final = (
    "connect_timeout_s",
    "connections",
    "endpoint",
    "if_absent",
    "path_style",
    "profile",
    "region",
    "timeout_s",
    "tries",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a URL says. Credentials come by the usual ways of boto3, never from here.

    ``if_absent`` keeps what lies there already: for a store where equal keys mean equal bytes.
    A range longer than ``piece_bytes`` is read in pieces at the same time; an object larger than
    ``multipart_bytes`` is sent in parts of ``part_bytes``, of which S3 wants 5 MiB at least.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool = False
    if_absent: bool = False
    connections: int = 8
    tries: int = 3
    timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    piece_bytes: int = 8 * MIB
    part_bytes: int = 8 * MIB
    multipart_bytes: int = 32 * MIB


def parse_url(url: str) -> Settings:
    """Return what the URL says. Raises ``ConfigError``."""
    options = url_options(url, OPTIONS)
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            "credentials do not belong into an s3:// URL: use a profile, or any other "
            "way that boto3 knows"
        )
    if not parts.netloc:
        raise ConfigError("an s3:// URL names a bucket: s3://bucket/prefix")
    prefix = unquote(parts.path).strip("/")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        _check_endpoint(endpoint)
    return Settings(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=endpoint,
        region=options.get("region"),
        profile=options.get("profile"),
        path_style=_switch(options, "path_style", default=endpoint is not None),
        if_absent=_switch(options, "if_absent", default=False),
        connections=_whole(options, "connections", 8, CONNECTIONS_MAX),
        tries=_whole(options, "tries", 3, TRIES_MAX),
        timeout_s=_number(options, "timeout_s", 5, 0.01, 3600),
        connect_timeout_s=_number(options, "connect_timeout_s", 2, 0.01, 3600),
    )


def client_config(settings: Settings) -> Config:
    """Return how boto3 is to behave: few tries with jitter, and a connection for every thread."""
    options: dict[str, Any] = {
        "max_pool_connections": settings.connections,
        "read_timeout": settings.timeout_s,
        "connect_timeout": settings.connect_timeout_s,
        "retries": {"mode": "standard", "total_max_attempts": settings.tries},
        "s3": {"addressing_style": "path" if settings.path_style else "auto"},
        # The store verifies what it is sent; what comes back is verified where it gives a sum.
        "request_checksum_calculation": "when_supported",
        "response_checksum_validation": "when_supported",
    }
    return Config(**options)


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"}:
        raise ConfigError("the endpoint of an s3:// URL begins with http:// or https://")
    if "@" in parts.netloc:
        raise ConfigError("credentials do not belong into the endpoint of an s3:// URL")


def _switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    if text not in _SWITCH:
        raise ConfigError(f"{name} is {text!r}{nearest(text, _SWITCH)}; allowed: no, yes")
    return _SWITCH[text]


def _whole(options: Mapping[str, str], name: str, default: int, high: int) -> int:
    value = _number(options, name, default, 1, high)
    if not value.is_integer():
        raise ConfigError(f"{name} of an s3:// URL is {options[name]!r}; allowed: a whole number")
    return int(value)


def _number(
    options: Mapping[str, str], name: str, default: float, low: float, high: float
) -> float:
    text = options.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{name} of an s3:// URL is {text!r}; allowed is {low:g} to {high:g}")
    return value
