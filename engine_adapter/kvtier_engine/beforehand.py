"""What can be found out of settings before the model is loaded, which takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, MissingExtraError, RegistryError
from kvtier.interfaces import Connector, Listable
from kvtier.obs.access_log import kept_salt
from kvtier.obs.event_publisher import EventPublisher
from kvtier.obs.spans import OtelSpans
from kvtier.registry import connect as connect_url
from kvtier.registry import shown_url
from kvtier_engine.options import BUNDLED_MODEL
from kvtier_engine.settings import EngineConfig

_REFUSALS = (ConfigError, MissingExtraError, RegistryError)


def check_beforehand(
    config: EngineConfig, *, connect: Callable[[str], Connector] = connect_url
) -> None:
    """Try what the settings name, and leave it again; imports no torch.

    A store that is down is no error, as ever. Raises ``ConfigError``, ``MissingExtraError`` or
    ``RegistryError`` with the option's name; no message shows a password.
    """
    if config.model != BUNDLED_MODEL and not Path(config.model).exists():
        raise ConfigError(f"--model {config.model}: there is no such file or folder")
    for url in config.remote:
        trial = _try_remote(url, config.remote_bytes, connect)
        _told(f"--remote {shown_url(url)}", partial(asyncio.run, trial))
    if config.access_log:
        path = Path(config.access_log)
        _told("--access-log", lambda: kept_salt(path.with_name(path.name + ".salt")))
    if config.traces:
        _told("--traces", OtelSpans)
    if config.kv_events:
        _told("--kv-events", lambda: EventPublisher(config.kv_events, clock=SystemClock()).close())


async def _try_remote(url: str, capacity_bytes: int, connect: Callable[[str], Connector]) -> None:
    connector = connect(url)
    try:
        if capacity_bytes and not isinstance(connector, Listable):
            raise ConfigError(
                "--remote-bytes needs a store that can list what it holds; this one bounds itself"
            )
    finally:
        await connector.close()


def _told(option: str, trial: Callable[[], object]) -> None:
    """Let ``trial`` raise with the option's name before what it says."""
    try:
        trial()
    except _REFUSALS as error:
        raise type(error)(f"{option}: {error}") from error
