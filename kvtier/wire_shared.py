"""What both ends of the cache server's wire do with memory that they share."""

from __future__ import annotations

import asyncio
import select
import socket

from kvtier.constants import SHARED_PIECE_BYTES


async def copied(source: memoryview, target: memoryview) -> None:
    """Copy bytes, piece by piece: other tasks and threads have their turn in between.

    Once it has returned, or was cancelled, neither is touched any more.
    """
    for start in range(0, len(source), SHARED_PIECE_BYTES):
        if start:
            await asyncio.sleep(0)
        piece = slice(start, start + SHARED_PIECE_BYTES)
        target[piece] = source[piece]


def hung_up(connection: socket.socket) -> bool:
    """Tell whether the other side has hung up, whatever it had sent before.

    A server hangs up before it lets go of what was leased: what was read before this says no was
    what had been leased.
    """
    watched = select.poll()
    try:
        watched.register(connection, select.POLLRDHUP)
    except ValueError:  # It is closed on this side.
        return True
    return bool(watched.poll(0))
