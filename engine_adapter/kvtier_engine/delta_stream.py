"""A request's deltas on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading

from kvtier_engine.types import Delta


def merged(first: Delta, second: Delta) -> Delta:
    """Return one delta that says what two in a row say."""
    return Delta(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        usage=second.usage,
        finish_reason=second.finish_reason,
        error=second.error,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )


class DeltaStream:
    """Holds at most one delta: a reader that is slow finds those it missed merged into one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: Delta | None = None
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add a delta. Any thread; never blocks. Raises ``RuntimeError`` on a closed loop."""
        with self._lock:
            waiting = self._pending is not None
            self._pending = delta if self._pending is None else merged(self._pending, delta)
        if not waiting:
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> Delta:
        """Wait for the next delta. On the loop's thread, one reader."""
        await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            delta, self._pending = self._pending, None
        assert delta is not None
        return delta
