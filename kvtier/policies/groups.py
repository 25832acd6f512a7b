"""Groups of blocks that age alike, and bins of the groups that something can leave from.

The rows of a group lie on one path of the tree and were accessed at one instant, so only its
deepest row can be a leaf. A group stands in a bin (its rows' kind, level and bucket of age) exactly
while its deepest row is one. 16 bytes a group, in flat arrays.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from kvtier.policies.blocks import LOST, NONE, Blocks
from kvtier.policies.reuse import BUCKETS, EDGES_S, bucket_of

#: The bin of rows that no lookup reaches any more.
LOST_BIN: Final = -1 << 30
UNFILED: Final = 1 << 30


class _Change(NamedTuple):
    """A group was filed (``bin_before`` is UNFILED) or taken out from where it says."""

    group: int
    bin_before: int
    before: int
    after: int


class Groups:
    """Owned by a policy, over its blocks. ``now`` is set by the owner and never falls."""

    def __init__(self, blocks: Blocks, kinds: int) -> None:
        self.now = 0.0
        self.deepest = array("i")
        self.bin_of = array("i")
        self.bins: dict[int, list[int]] = {}  # the first and the last group
        #: Bins that came to be since the owner last cleared this.
        self.new_bins: list[int] = []
        self.after = array("i")
        self._before = array("i")
        self._free: list[int] = []
        self._blocks = blocks
        self._kinds = kinds
        # Rows plucked and groups filed or taken out since ``begin``; None outside.
        self._changes: list[_Change | int] | None = None

    def new(self, row: int) -> int:
        """Return a new group of one row, filed if that is a leaf."""
        blocks = self._blocks
        if self._free:
            group = self._free.pop()
            self.deepest[group] = row
        else:
            group = len(self.deepest)
            self.deepest.append(row)
            self.bin_of.append(UNFILED)
            self._before.append(NONE)
            self.after.append(NONE)
        blocks.group[row] = group
        blocks.up[row] = blocks.down[row] = NONE
        if blocks.child[row] < 0:
            self.file(group)
        return group

    def put_below(self, group: int, row: int) -> None:
        """Add a row below the deepest one of a group."""
        blocks = self._blocks
        deepest = self.deepest[group]
        blocks.group[row] = group
        blocks.up[row], blocks.down[row] = deepest, NONE
        blocks.down[deepest] = row
        self.deepest[group] = row
        self.refile(group)

    def leave(self, row: int) -> bool:
        """Take a row, a held one, out of its group, if it has one. True: that was its last."""
        blocks = self._blocks
        group = blocks.group[row]
        if group < 0:
            return False
        blocks.group[row] = NONE
        up, down = blocks.up[row], blocks.down[row]
        if up >= 0:
            blocks.down[up] = down
        if down >= 0:
            blocks.up[down] = up
        elif up >= 0:
            self.deepest[group] = up
            if self.bin_of[group] != UNFILED:
                self.unfile(group)  # What is above a held row is no leaf.
        else:
            self.free(group)
            return True
        return False

    def free(self, group: int) -> None:
        """Give up a group whose last row has left."""
        if self.bin_of[group] != UNFILED:
            self.unfile(group)
        self._free.append(group)

    def refile(self, group: int) -> None:
        """File or take out a group according to its deepest row."""
        is_leaf = self._blocks.child[self.deepest[group]] < 0
        if is_leaf != (self.bin_of[group] != UNFILED):
            if is_leaf:
                self.file(group)
            else:
                self.unfile(group)

    def refile_if_deepest(self, row: int) -> None:
        """File or take out the group of a row that got or lost children, if it is the deepest."""
        group = self._blocks.group[row]
        if group >= 0 and self.deepest[group] == row:
            self.refile(group)

    def file(self, group: int) -> None:
        """Put a group last in the bin of its kind, level and age."""
        blocks = self._blocks
        row = self.deepest[group]
        if blocks.state[row] & LOST:
            where = LOST_BIN
        else:
            base = blocks.level[row] * self._kinds + blocks.kind[row]
            where = base * BUCKETS + bucket_of(self.now - blocks.accessed[row])
        ends = self.bins.get(where)
        if ends is None:
            self.bins[where] = [group, group]
            self.new_bins.append(where)
            self._before[group] = NONE
        else:
            self.after[ends[1]] = group
            self._before[group] = ends[1]
            ends[1] = group
        self.after[group] = NONE
        self.bin_of[group] = where
        if self._changes is not None:
            self._changes.append(_Change(group, UNFILED, NONE, NONE))

    def unfile(self, group: int) -> None:
        """Take a group out of its bin."""
        where = self.bin_of[group]
        before, after = self._before[group], self.after[group]
        if before < 0 and after < 0:
            del self.bins[where]
        elif before < 0:
            self._before[after] = NONE
            self.bins[where][0] = after
        elif after < 0:
            self.after[before] = NONE
            self.bins[where][1] = before
        else:
            self.after[before] = after
            self._before[after] = before
        self.bin_of[group] = UNFILED
        if self._changes is not None:
            self._changes.append(_Change(group, where, before, after))

    def first(self, where: int) -> int:
        """Return the first group of a bin, or NONE."""
        ends = self.bins.get(where)
        return ends[0] if ends is not None else NONE

    def pluck(self, row: int) -> None:
        """Take a leaf that is the deepest of its group out of tree and group, after ``begin``.

        A group that becomes empty stands in its bin until its owner frees it.
        """
        blocks = self._blocks
        group, up = blocks.group[row], blocks.up[row]
        parent = blocks.unlink(row)
        assert self._changes is not None, "pluck outside of begin and commit"
        self._changes.append(row)
        self.deepest[group] = up
        if up >= 0:
            blocks.down[up] = NONE
            self.refile(group)
        if parent >= 0 and parent != up:
            self.refile_if_deepest(parent)

    def begin(self) -> None:
        """Note every change from now on, so that it can be taken back."""
        self._changes = []

    def commit(self) -> None:
        """Keep what was done since ``begin``."""
        self._changes = None

    def roll_back(self) -> None:
        """Take back what was done since ``begin``."""
        changes, self._changes = self._changes, None
        for change in reversed(changes or []):
            if isinstance(change, int):
                self._put_back(change)
            elif change.bin_before == UNFILED:
                self.unfile(change.group)
            else:
                self._file_again(change)

    def _put_back(self, row: int) -> None:
        blocks = self._blocks
        group, up = blocks.group[row], blocks.up[row]
        self.deepest[group] = row
        if up >= 0:
            blocks.down[up] = row
        if blocks.parent[row] >= 0:
            blocks.link(row, blocks.parent[row])

    def _file_again(self, change: _Change) -> None:
        group, where, before, after = change
        ends = self.bins.setdefault(where, [group, group])
        if before >= 0:
            self.after[before] = group
        else:
            ends[0] = group
        if after >= 0:
            self._before[after] = group
        else:
            ends[1] = group
        self._before[group], self.after[group] = before, after
        self.bin_of[group] = where

    def age(self) -> None:
        """Move groups on to the bins of their ages. Within a bin, the front is about the oldest."""
        accessed, deepest = self._blocks.accessed, self.deepest
        for where in list(self.bins):
            bucket = where % BUCKETS
            if where == LOST_BIN or bucket == BUCKETS - 1:
                continue
            limit = self.now - EDGES_S[bucket + 1]
            ends = self.bins[where]
            while True:
                group = ends[0]
                row = deepest[group]
                if row < 0 or accessed[row] > limit:
                    break
                last = group == ends[1]
                self.unfile(group)
                self.file(group)
                if last:
                    break

    def check_integrity(self, held: list[int]) -> None:
        """Raise ``AssertionError`` unless each held row is in one group, filed as it should be."""
        blocks = self._blocks
        filed: list[int] = []
        for where in self.bins:
            group = self.first(where)
            while group >= 0:
                filed.append(group)
                if self.bin_of[group] != where:
                    raise AssertionError(f"group {group} is not in the bin that it names")
                group = self.after[group]
        leaves = {blocks.group[row] for row in held if blocks.child[row] < 0}
        if len(filed) != len(leaves) or set(filed) != leaves:
            raise AssertionError("the bins do not hold exactly the groups that have a leaf")
        for group in {blocks.group[row] for row in held}:
            row = self.deepest[group]
            while row >= 0:
                if blocks.group[row] != group or row not in held:
                    raise AssertionError(f"row {row} is in a group that it does not name")
                row = blocks.up[row]
