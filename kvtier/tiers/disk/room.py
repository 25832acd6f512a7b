"""Which directory takes a chunk, and what must leave for that. Pure.

The policy ranks the chunks of all directories together, so what it lets go need not lie where room
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from kvtier.constants import TRIM_CHUNKS_MAX
from kvtier.types import ChunkKey

#: Stands for a chunk that asks the policy for room where what it let go has left none.
ROOM: Final = ChunkKey(b"room for a chunk")


class Directory(Protocol):
    """What counts of a directory."""

    @property
    def accepts(self) -> bool:
        """True when a write may be started there now."""
        ...

    @property
    def readable(self) -> bool:
        """True when a load may ask there now."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that chunks may take there."""
        ...

    @property
    def room_bytes(self) -> int:
        """Bytes that a new chunk may take there now."""
        ...


DirectoryT = TypeVar("DirectoryT", bound=Directory)


def has_place(directories: Sequence[Directory], nbytes: int) -> bool:
    """Tell whether any directory may take a chunk of that size, once enough has left."""
    return any(each.accepts and each.capacity_bytes >= nbytes for each in directories)


def make_room(
    directories: Sequence[DirectoryT], nbytes: int, evict_more: Callable[[], bool]
) -> DirectoryT | None:
    """Return the directory with most room that accepts writes, once it has enough.

    One that can be read goes before one that cannot. ``evict_more`` lets at least one chunk go
    from anywhere, or returns False; with one directory it is never called, since there everything
    that can make room has. None: no room, after at most ``TRIM_CHUNKS_MAX`` calls.
    """
    for _ in range(TRIM_CHUNKS_MAX):
        usable = [each for each in directories if each.accepts]
        best = max(usable, key=lambda each: (each.readable, each.room_bytes), default=None)
        if best is None or best.capacity_bytes < nbytes:
            return None
        if best.room_bytes >= nbytes:
            return best
        if len(directories) == 1 or not evict_more():
            return None
    return None
