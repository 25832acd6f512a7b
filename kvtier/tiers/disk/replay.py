"""What the rows of a snapshot are after the changes of its log. Pure; no object per row.

Loops here run in Python, so that other threads get their turn every few milliseconds; what runs
in numpy lets them run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.tiers.disk.index_format import Batch
from kvtier.tiers.disk.rows import ROW_DTYPE, Array, KeyIndex, Rows


def replay(snapshot: Rows, batches: Sequence[Batch]) -> Rows:
    """Return the rows in order of their last use, and of their kinds those that occur.

    A row that is added replaces one of the same key, a removal hits only the generation it names,
    and a use moves a row to the newest end.
    """
    if not batches:
        return snapshot
    added = _added(snapshot, batches)
    changes = _Changed(snapshot.array, added.array)
    for batch in batches:
        changes.take(batch)
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

    def __init__(self, snapshot: Array, added: Array) -> None:
        self.gone: set[int] = set()
        self.used_ms: dict[int, int] = {}
        self._old = snapshot
        self._added = added
        self._index = KeyIndex(snapshot)
        self._next = len(snapshot)
        self._rows: dict[bytes, int] = {}  # where the snapshot is outdated; -1: removed

    def take(self, batch: Batch) -> None:
        """Let a batch take effect."""
        for _ in range(len(batch.added)):
            self._add(self._next)
            self._next += 1
        for removed in batch.removed:
            self._remove(*removed.item())
        for used in batch.used:
            self._use(used.item(), batch.used_ms)

    def _row(self, key: bytes) -> int:
        row = self._rows.get(key)
        return self._index.find(key) if row is None else row

    def _add(self, row: int) -> None:
        added = self._added[row - len(self._old)]
        key: bytes = added["key"].item()
        self._drop(self._row(key))
        self._rows[key] = row
        self.used_ms[row] = int(added["used_ms"])

    def _remove(self, key: bytes, generation: int) -> None:
        row = self._row(key)
        if row < 0:
            return
        count = len(self._old)
        there = self._old[row] if row < count else self._added[row - count]
        if int(there["generation"]) == generation:
            self._drop(row)
            self._rows[key] = -1

    def _use(self, key: bytes, used_ms: int) -> None:
        row = self._row(key)
        if row >= 0:
            self.used_ms.pop(row, None)
            self.used_ms[row] = used_ms

    def _drop(self, row: int) -> None:
        if row >= 0:
            self.used_ms.pop(row, None)
            self.gone.add(row)


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
