"""What the rows of a snapshot are after the changes of its log. Pure; no object per row.

Loops here run in Python, so that other threads get their turn every few milliseconds; what runs
in numpy lets them run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.constants import DIGEST_BYTES
from kvtier.tiers.disk.index_format import Batch
from kvtier.tiers.disk.rows import ROW_DTYPE, Array, KeyIndex, Rows

#: Keys that become objects together.
_STEP: Final = 4096


def replay(snapshot: Rows, batches: Sequence[Batch]) -> Rows:
    """Return the rows in order of their last use, and of their kinds those that occur.

    A row that is added replaces one of the same key, a removal hits only the generation it names,
    and a use moves a row to the newest end.
    """
    if not batches:
        return snapshot
    added = _added(snapshot, batches)
    changes = _Changed(snapshot.array, added.array, batches)
    old = snapshot.array
    kept = np.ones(len(old), np.bool_)
    kept[[row for row in changes.gone if row < len(old)]] = False
    kept[[row for row in changes.used_ms if row < len(old)]] = False
    kept_count = int(np.count_nonzero(kept))
    array = np.empty(kept_count + len(changes.used_ms), ROW_DTYPE)
    np.compress(kept, old, out=array[:kept_count])
    newest = array[kept_count:]
    rows = np.fromiter(changes.used_ms, np.int64, len(newest))
    is_old = rows < len(old)
    newest[is_old] = old[rows[is_old]]
    newest[~is_old] = added.array[rows[~is_old] - len(old)]
    newest["used_ms"] = np.fromiter(changes.used_ms.values(), np.uint64, len(newest))
    return _without_unused(Rows(array, added.kinds))


class _Changed:
    """Which rows do not count any more, and which are at the newest end, in their order.

    Rows of the snapshot are counted from 0, those that were added behind them.
    """

    def __init__(self, snapshot: Array, added: Array, batches: Sequence[Batch]) -> None:
        self.gone: set[int] = set()
        self.used_ms: dict[int, int] = {}
        self._old = snapshot
        self._added = added
        self._next = len(snapshot)
        self._rows: dict[bytes, int] = {}  # where the snapshot is outdated; -1: removed
        keys = [batch.keys for batch in batches]
        # Asked together, since numpy overlaps the waits for memory that Python adds up.
        words = np.concatenate(keys).view(np.uint64).reshape(-1, DIGEST_BYTES // 8)
        found = KeyIndex(snapshot).find_all(words)
        start = 0
        for batch, mine in zip(batches, keys, strict=True):
            self._take(batch, mine, found[start : start + len(mine)])
            start += len(mine)

    def _take(self, batch: Batch, keys: Array, found: Array) -> None:
        """Let a batch take effect, some keys at a time."""
        added, removed = len(batch.added), len(batch.removed)
        first, last = added, added + removed
        for start in range(0, len(keys), _STEP):
            rows = found[start : start + _STEP].tolist()
            for i, (key, row) in enumerate(zip(_texts(keys, start), rows, strict=True), start):
                row = self._rows.get(key, row)  # noqa: PLW2901 - what has become of it
                if i < first:
                    self._add(key, row)
                elif i < last:
                    self._remove(key, row, int(batch.removed["generation"][i - first]))
                elif row >= 0:
                    self.used_ms.pop(row, None)
                    self.used_ms[row] = batch.used_ms

    def _add(self, key: bytes, before: int) -> None:
        self._drop(before)
        self._rows[key] = self._next
        self.used_ms[self._next] = int(self._added["used_ms"][self._next - len(self._old)])
        self._next += 1

    def _remove(self, key: bytes, row: int, generation: int) -> None:
        if row < 0:
            return
        count = len(self._old)
        there = self._old[row] if row < count else self._added[row - count]
        if int(there["generation"]) == generation:
            self._drop(row)
            self._rows[key] = -1

    def _drop(self, row: int) -> None:
        if row >= 0:
            self.used_ms.pop(row, None)
            self.gone.add(row)


def _texts(keys: Array, start: int) -> list[bytes]:
    found: list[bytes] = keys[start : start + _STEP].tolist()
    return found


def _added(snapshot: Rows, batches: Sequence[Batch]) -> Rows:
    """Return what was added, with the kinds of snapshot and log together."""
    kinds = list(snapshot.kinds)
    numbers = {kind: number for number, kind in enumerate(kinds)}
    arrays: list[Array] = []
    for batch in batches:
        array = batch.added.array.copy()
        for kind in batch.added.kinds:
            if kind not in numbers:
                numbers[kind] = len(kinds)
                kinds.append(kind)
        renumbered = np.array([numbers[kind] for kind in batch.added.kinds], np.uint32)
        array["kind"] = renumbered[array["kind"]]
        arrays.append(array)
    return Rows(np.concatenate(arrays), kinds)


def _without_unused(rows: Rows) -> Rows:
    """Forget kinds that no row has. The array is the caller's own and changes."""
    counts = np.bincount(rows.array["kind"].astype(np.int64), minlength=len(rows.kinds))
    used = counts > 0
    if not used.all():
        rows.array["kind"] = (np.cumsum(used) - 1).astype(np.uint32)[rows.array["kind"]]
    kinds = [kind for kind, there in zip(rows.kinds, used, strict=True) if there]
    return Rows(rows.array, kinds)
