"""``Throttled``: a connector no faster than a link of given rate and latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, ConnectorError
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators.base import Decorator, pause

#: A transfer takes the link for so long at a time, so others share it and a new rate is felt.
_STEP_S: Final = 0.02


class Throttled(Decorator):
    """Lets bytes through at ``bytes_per_s`` each way, and every call ``latency_s`` later.

    Payload only is counted, reads and writes apart, as on a link with two directions. Transfers
    that overlap share a direction; latencies pass at the same time. Both figures may be set at any
    time: a transfer that is under way goes on at the new rate within 20 ms of link time, and the
    new latency is that of later calls. A write's bytes are sent before they are stored, a read's
    arrive after they were read.
    """

    def __init__(
        self,
        inner: Connector,
        *,
        bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """Wrap ``inner``; ``math.inf`` is a link without a limit.

        Raises ``ConfigError`` for a rate that is not above 0 or a negative latency.
        """
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._up, self._down = _Direction(), _Direction()
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """The rate of each direction."""
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float) -> None:
        """Change the rate; also while transfers are under way."""
        if not value > 0:
            raise ConfigError(f"bytes_per_s is {value}; it must be above 0")
        self._bytes_per_s = value

    @property
    def latency_s(self) -> float:
        """What each call takes beside its bytes."""
        return self._latency_s

    @latency_s.setter
    def latency_s(self, value: float) -> None:
        """Change the latency of later calls."""
        if not value >= 0:
            raise ConfigError(f"latency_s is {value}; it must not be below 0")
        self._latency_s = value

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask after the latency."""
        await pause(self._clock, self._latency_s)
        return await super().contains(keys)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read after the latency; answer when the bytes that were found have passed the link."""
        await pause(self._clock, self._latency_s)
        outcomes = await super().read(requests, into)
        await self._pass(self._down, sum(each for each in outcomes if isinstance(each, int)))
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write when latency and link have let the bytes through."""
        await pause(self._clock, self._latency_s)
        await self._pass(self._up, sum(item.data.nbytes for item in items))
        return await super().write(items)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete after the latency."""
        await pause(self._clock, self._latency_s)
        await super().delete(keys)

    async def _pass(self, direction: _Direction, nbytes: float) -> None:
        ready_at = self._clock.now()
        while nbytes > 0:
            step = min(nbytes, self._bytes_per_s * _STEP_S)
            # From where this transfer's last step ended, so that waking late costs no rate.
            ready_at = max(direction.free_at, ready_at) + step / self._bytes_per_s
            direction.free_at = ready_at
            nbytes -= step
            await pause(self._clock, ready_at - self._clock.now())


class _Direction:
    """One way of the link: the instant from which it is free."""

    def __init__(self) -> None:
        self.free_at = -math.inf
