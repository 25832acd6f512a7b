"""Who waits for the same thing goes on in the order of arrival. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from contextlib import suppress


class Turns:
    """Queues, each for one thing; what nobody waits for takes no memory.

    Who has waits holds up those behind, so a holder gives its turn back soon. How many wait is
    bounded by whoever lets requests in.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Return how many things somebody has or waits for."""
        return len(self._queues)

    async def take(self, what: Hashable, seconds: float) -> bool:
        """Wait for one's turn, so long at most; False: it has not come. Else ``give`` it back."""
        queue = self._queues.get(what)
        if queue is None:
            self._queues[what] = deque()
            return True
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await turn
        except TimeoutError:
            # It may have come in the same moment.
            if turn.done() and not turn.cancelled():
                return True
            self._leave(what, turn)
            return False
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(what)
            else:
                self._leave(what, turn)
            raise
        return True

    def give(self, what: Hashable) -> None:
        """Let the next one have it."""
        queue = self._queues[what]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._queues[what]

    def _leave(self, what: Hashable, turn: asyncio.Future[None]) -> None:
        # It may have been passed over already, and nobody be there any more.
        queue = self._queues.get(what)
        if queue is not None:
            with suppress(ValueError):
                queue.remove(turn)
