"""The settings that a running server goes by: all that can change does, or nothing does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.constants import DAEMON_TOKENS_MAX
from kvtier.errors import ConfigError
from kvtier_server.data_plane import DataPlane
from kvtier_server.settings import DaemonConfig


class Live:
    """Belongs to the event loop. ``config`` is what holds now."""

    def __init__(
        self,
        config: DaemonConfig,
        read: Callable[[], DaemonConfig],
        cache: Cache,
        plane: DataPlane,
        contexts: Sequence[ssl.SSLContext],
    ) -> None:
        """``read`` reads all settings anew, files of secrets too; it raises ``ConfigError``.

        ``contexts`` are what sockets with TLS go by.
        """
        self.config = config
        self._read = read
        self._cache = cache
        self._plane = plane
        self._contexts = contexts
        self._reading = False
        self._apply()

    async def reload(self) -> list[str]:
        """Read everything anew and go by it; return the options that are others now.

        Certificates are read anew whether or not they are others, and quotas that were set by hand
        are those of the file again. Raises ``ConfigError`` for settings that cannot be, and for
        others of what cannot change while the server runs; then everything is as it was.
        """
        if self._reading:
            raise ConfigError("the settings are being read already")
        self._reading = True
        try:
            after = await asyncio.to_thread(self._look)
        finally:
            self._reading = False
        if after.tls is not None:
            for context in self._contexts:
                after.tls.renew(context)
        changed = _changed(self.config.live(), after.live())
        self.config = after
        self._apply()
        return changed

    def set_quota(self, credential: str | None, nbytes: int | None) -> None:
        """Let a credential hold so much, None: as much as all; or all, where none is named.

        Holds until the settings are read anew. Raises ``ConfigError`` where too many have one.
        """
        quotas = dict(self.config.quotas)
        if credential is None:
            self.config = replace(self.config, quota_bytes=nbytes or 0)
        else:
            quotas.pop(credential, None)
            quotas |= {} if nbytes is None else {credential: nbytes}
            if len(quotas) > DAEMON_TOKENS_MAX:
                raise ConfigError(f"allowed are {DAEMON_TOKENS_MAX} quotas of single credentials")
            self.config = replace(self.config, quotas=quotas)
        self._cache.tenants.limit(self.config.quota_bytes, self.config.quotas)

    def _look(self) -> DaemonConfig:
        after = self._read()
        fixed = _changed(self.config.fixed(), after.fixed())
        if fixed:
            others = "cannot change while the server runs; start it anew, or take that back"
            raise ConfigError(f"{', '.join(fixed)}: {others}")
        if after.tls is not None:
            after.tls.context()
        return after

    def _apply(self) -> None:
        config = self.config
        logging.getLogger().setLevel(config.log_level.upper())
        self._cache.tenants.limit(config.quota_bytes, config.quotas)
        self._plane.change(config.door, config.connections_max, config.idle_s)
        for address in config.listen:
            if address.path:
                # Where somebody has removed it nobody comes in by it, whatever its mode.
                with contextlib.suppress(FileNotFoundError):
                    Path(address.path).chmod(config.socket_mode)


def _changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [name for name, value in before.items() if after[name] != value]
