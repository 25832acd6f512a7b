"""``Retrying``: once more for the keys whose error may pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvtier.clock import SystemClock
from kvtier.errors import (
    ConfigError,
    ConnectorError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators.base import Decorator, pause

#: What another try may mend. A refusal or wrong bytes would come again.
PASSING: Final = (ConnectorTimeoutError, ConnectorUnavailableError)


class Retrying(Decorator):
    """Tries failed reads and writes again, at most ``tries_max`` times in all.

    Before try n it waits between 0 and ``backoff_s * 2**(n - 2)`` seconds, at most
    ``backoff_s_max``: "full jitter" of the AWS Architecture Blog, "Exponential Backoff And Jitter"
    (2015), so that clients that failed together do not come back together. Only the keys whose
    error may pass are asked for again, and the last outcome counts. Lookups and deletes have no
    outcome that tells of an error, so they are never repeated.
    """

    def __init__(
        self,
        inner: Connector,
        *,
        seed: int,
        tries_max: int = 3,
        backoff_s: float = 0.05,
        backoff_s_max: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        """Wrap ``inner``. ``seed`` decides the waits; give each process its own.

        Raises ``ConfigError`` for fewer than one try and for a negative wait.
        """
        super().__init__(inner)
        if tries_max < 1:
            raise ConfigError(f"tries_max is {tries_max}; it must be 1 or more")
        if not 0 <= backoff_s <= backoff_s_max:
            raise ConfigError(f"backoff_s is {backoff_s}; allowed is 0 to {backoff_s_max}")
        self._tries_max = tries_max
        self._backoff_s = backoff_s
        self._backoff_s_max = backoff_s_max
        self._random = random.Random(seed)  # noqa: S311 (waits, no secrets)
        self._clock = clock or SystemClock()

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read, and read again what failed for a reason that may pass."""
        outcomes = await super().read(requests, into)
        for tried in range(1, self._tries_max):
            again = _failed(outcomes)
            if not again:
                break
            await self._wait(tried)
            buffers = [into[index] for index in again]
            newer = await super().read([requests[index] for index in again], buffers)
            for index, outcome in zip(again, newer, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write, and write again what failed for a reason that may pass."""
        outcomes = await super().write(items)
        for tried in range(1, self._tries_max):
            again = _failed(outcomes)
            if not again:
                break
            await self._wait(tried)
            newer = await super().write([items[index] for index in again])
            for index, outcome in zip(again, newer, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _wait(self, tried: int) -> None:
        most = min(self._backoff_s_max, self._backoff_s * 2.0 ** (tried - 1))
        await pause(self._clock, self._random.uniform(0, most))


def _failed(outcomes: Sequence[object]) -> list[int]:
    return [index for index, outcome in enumerate(outcomes) if isinstance(outcome, PASSING)]
