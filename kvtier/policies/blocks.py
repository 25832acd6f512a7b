"""Columns of what a policy knows of blocks, held ones and ghosts: their tree and their paths.

A row per block in flat arrays, 48 bytes each; the dict that finds a row and the key itself come on
top. Policies of this package read the columns directly; rows change through the methods.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvtier.types import ChunkKey, Entry

NONE: Final = -1

# Bits of ``state``. The lowest two count accesses, up to 3.
COUNT: Final = 3
HELD: Final = 4
SHARED: Final = 8
GHOST: Final = 16
LOST: Final = 32
#: A child was seen, and ``print`` tells the first one from others.
PARENT: Final = 64


class Blocks:
    """Rows by key. A row that is not held is a ghost, or stands for the parent of a held one.

    ``up`` and ``down`` link a held row to the nearest row above and below it in its group; they
    link a ghost to its neighbours in the list of ghosts, the oldest first.
    """

    def __init__(self) -> None:
        self.row_of: dict[ChunkKey, int] = {}
        self.keys: list[ChunkKey] = []
        self.nbytes = array("q")
        self.accessed = array("d")
        self.parent = array("i")
        self.child = array("i")
        self.sibling_after = array("i")
        self.sibling_before = array("i")
        self.group = array("i")
        self.up = array("i")
        self.down = array("i")
        self.kind = array("B")
        self.level = array("b")
        self.state = array("B")
        self.print = array("B")
        self.ghost_count = 0
        self.oldest_ghost = NONE
        self._newest_ghost = NONE
        self._free: list[int] = []

    def row(self, key: ChunkKey) -> int:
        """Return the row of a key, a new one if it has none."""
        row = self.row_of.get(key)
        if row is not None:
            return row
        if self._free:
            row = self._free.pop()
            self.keys[row] = key
            self.accessed[row] = 0.0
            self.kind[row] = self.state[row] = 0
        else:
            row = len(self.keys)
            self.keys.append(key)
            self.nbytes.append(0)
            self.accessed.append(0.0)
            for column in (
                self.parent,
                self.child,
                self.sibling_after,
                self.sibling_before,
                self.group,
                self.up,
                self.down,
            ):
                column.append(NONE)
            for small in (self.kind, self.level, self.state, self.print):
                small.append(0)
        self.row_of[key] = row
        return row

    def attach(self, row: int, entry: Entry) -> None:
        """Make a row that is no ghost (any more) the held row of an entry, below its parent.

        A parent with two different children is shared, and so is all above it.
        """
        self.nbytes[row] = entry.nbytes
        state = self.state[row] = self.state[row] | HELD
        if entry.parent is None:
            self.parent[row] = NONE
            return
        parent = self.row_of.get(entry.parent, NONE)
        if parent < 0:
            parent = self.row(entry.parent)
        parent_state = self.state[parent]
        if parent_state & GHOST:
            self.revive(parent)
            parent_state &= ~GHOST
        self.parent[row] = parent
        self.link(row, parent)
        mark = entry.key[-1] if entry.key else 0
        if not parent_state & PARENT:
            self.state[parent] = parent_state | PARENT
            self.print[parent] = mark
        elif not parent_state & SHARED and self.print[parent] != mark:
            self.share(parent)
        if state & SHARED:
            self.share(parent)

    def link(self, row: int, parent: int) -> None:
        """Put a row first among the children of its parent."""
        first = self.child[parent]
        self.sibling_after[row] = first
        self.sibling_before[row] = NONE
        if first >= 0:
            self.sibling_before[first] = row
        self.child[parent] = row

    def unlink(self, row: int) -> int:
        """Take a row from the children of its parent. Return the parent if that has none now."""
        parent = self.parent[row]
        if parent < 0:
            return NONE
        before, after = self.sibling_before[row], self.sibling_after[row]
        if after >= 0:
            self.sibling_before[after] = before
        if before >= 0:
            self.sibling_after[before] = after
            return NONE
        self.child[parent] = after
        return parent if after < 0 else NONE

    def share(self, row: int) -> None:
        """Mark a row as shared, and all above it that are not yet."""
        while row >= 0 and not self.state[row] & SHARED:
            self.state[row] |= SHARED
            row = self.parent[row]

    def entomb(self, row: int) -> None:
        """Make a row that is not held and has no held child the newest ghost."""
        self.parent[row] = self.group[row] = NONE
        self.state[row] = self.state[row] & ~(HELD | LOST) | GHOST
        self.up[row], self.down[row] = self._newest_ghost, NONE
        if self._newest_ghost >= 0:
            self.down[self._newest_ghost] = row
        else:
            self.oldest_ghost = row
        self._newest_ghost = row
        self.ghost_count += 1

    def stand_in(self, row: int) -> None:
        """Let a row that is no longer held stand for the parent of its held children."""
        self.parent[row] = self.group[row] = NONE
        self.state[row] &= ~(HELD | LOST)

    def revive(self, row: int) -> None:
        """Take a row out of the list of ghosts."""
        up, down = self.up[row], self.down[row]
        if up >= 0:
            self.down[up] = down
        else:
            self.oldest_ghost = down
        if down >= 0:
            self.up[down] = up
        else:
            self._newest_ghost = up
        self.up[row] = self.down[row] = NONE
        self.state[row] &= ~GHOST
        self.ghost_count -= 1

    def forget(self, row: int) -> None:
        """Give up the row of a ghost."""
        self.revive(row)
        del self.row_of[self.keys[row]]
        self.keys[row] = ChunkKey(b"")
        self._free.append(row)

    def below(self, row: int) -> list[int]:
        """Return all held rows below a row, parents before children."""
        found: list[int] = []
        todo = [row]
        while todo:
            child = self.child[todo.pop()]
            while child >= 0:
                found.append(child)
                todo.append(child)
                child = self.sibling_after[child]
        return found
