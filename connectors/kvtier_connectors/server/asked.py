"""Requests of one connection that have no answer yet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from kvtier.wire import Message


@dataclass(slots=True, eq=False)
class Asked:
    """A request without its answer yet. ``into`` is where its payload belongs."""

    answer: asyncio.Future[tuple[Message, int]]
    into: memoryview | None
    deadline_s: float
    #: What the line had received before.
    before_bytes: int

    def fail(self, error: Exception) -> None:
        """Give up waiting."""
        if not self.answer.done():
            self.answer.set_exception(error)


async def any_of(asked: Collection[Asked]) -> None:
    """Wait until one of them has its answer. They belong to the running loop."""
    arrived = asyncio.get_running_loop().create_future()

    def arrive(_: object) -> None:
        if not arrived.done():
            arrived.set_result(None)

    for each in asked:
        each.answer.add_done_callback(arrive)
    try:
        await arrived
    finally:
        for each in asked:
            each.answer.remove_done_callback(arrive)
