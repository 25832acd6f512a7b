"""What a connector raises becomes a value or one of our errors, here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from kvtier.errors import (
    ConnectorRefusedError,
    ConnectorUnavailableError,
    KVTierError,
    TierError,
)
from kvtier.interfaces import Listable
from kvtier.types import KeyInfo

T = TypeVar("T")
Fault = OSError | KVTierError

_log = logging.getLogger("kvtier.remote")


async def listed_boundary(connector: Listable, prefix: bytes, objects_max: int) -> list[KeyInfo]:
    """Return what lies there. Raises ``KVTierError``, also beyond ``objects_max``."""
    found: list[KeyInfo] = []
    try:
        async for info in connector.list(prefix):
            if len(found) >= objects_max:
                raise ConnectorRefusedError(f"more than {objects_max} objects are there")
            found.append(info)
    except KVTierError:
        raise
    # As with calls: it must not raise, nor be cancelled by itself.
    except (Exception, asyncio.CancelledError) as error:
        raise ConnectorUnavailableError(f"listing raised {type(error).__name__}") from error
    return found


async def outcome_boundary(work: Awaitable[T]) -> T | Fault:
    """Return what comes of some work; its fault is a value, and a bug becomes one."""
    try:
        return await work
    except (OSError, KVTierError) as error:
        return error
    # Whoever waits for the outcome would wait for ever.
    except Exception as error:
        _log.exception("remote work failed")
        failure = TierError(f"remote work failed: {error!r}")
        failure.__cause__ = error
        return failure
