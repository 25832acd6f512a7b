"""What a disk tier holds and has not used since it was opened: columns instead of objects."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import numpy as np

from kvtier.constants import DIGEST_BYTES
from kvtier.tiers.disk.rows import (
    NO_PARENT,
    ROW_BYTES,
    Array,
    KeyIndex,
    Kind,
    Row,
    Rows,
    key_at,
    key_words,
)
from kvtier.types import ChunkKey

# Where a parent lies within a row's bytes, and the kind within its uint32 numbers.
_PARENT: Final = DIGEST_BYTES
_ROW_NUMBERS: Final = ROW_BYTES // 4
_KIND: Final = 2 * DIGEST_BYTES // 4 + 1


class ColdTable:
    """Rows of several directories in order of their last use. Used under the cache's lock.

    Rows only leave: when they are used, or removed, or when they are the coldest. Each call takes
    constant time, over many calls; about 120 bytes a row are held until the table itself goes.
    The constructor takes time in proportion and needs no lock.
    """

    def __init__(
        self, parts: Sequence[tuple[int, Rows]], known: Callable[[ChunkKey], bool]
    ) -> None:
        """Merge rows by their last use; those of each directory are in order already.

        ``known`` tells whether a chunk outside the table is held by the tier, so that what hangs
        below it can be reached. Of rows with one key the newest counts.
        """
        array, self._kinds, self._first_kinds = _merged(parts)
        self._rows = Rows(array, [kind for _, kind in self._kinds])
        # Item access through a memoryview takes a third of numpy's time.
        self._bytes = np.ascontiguousarray(array).view(np.uint8).data
        self._numbers = np.ascontiguousarray(array).view(np.uint32).data
        self._held_bytes = {number: int(rows.array["nbytes"].sum()) for number, rows in parts}
        self._count = len(array)
        self._kind_counts = np.bincount(array["kind"], minlength=len(self._kinds)).tolist()
        self._kinds_of: dict[bytes, list[int]] = {}
        for number, (_, kind) in enumerate(self._kinds):
            self._kinds_of.setdefault(kind.namespace, []).append(number)
        self._index = KeyIndex(array)
        parents = self._index.find_all(key_words(array, "parent"))
        parents[(key_words(array, "parent") == 0).all(axis=1)] = -1
        repeated = self._index.repeated()
        above = np.where(parents < 0, len(array) + self._tops(parents, known), parents)
        self._leaving = _unreachable(above, repeated)
        children = np.bincount(parents[parents >= 0], minlength=len(array)).astype(np.uint32)
        self._parents = parents.data
        self._children = children.data
        self._gone = bytearray(len(array))
        # Rows before ``_next`` are gone, have children here, or are in ``_passed``.
        self._next = 0
        self._passed: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for row in range(len(self._gone)):
            if not self._gone[row]:
                yield self._made(row)

    def __contains__(self, key: ChunkKey) -> bool:
        return self._find(key) >= 0

    def held_bytes(self, directory: int) -> int:
        """Return the bytes of a directory's files of which the table knows."""
        return self._held_bytes.get(directory, 0)

    @property
    def namespaces(self) -> Collection[bytes]:
        """The namespaces of which it holds, or held, something."""
        return self._kinds_of.keys()

    def bytes_of(self, namespace: bytes) -> int:
        """Return the bytes of a namespace's chunks."""
        kinds = self._kinds_of.get(namespace, ())
        return sum(self._kind_counts[number] * self._kinds[number][1].nbytes for number in kinds)

    def keys_of(self, namespaces: Collection[bytes], most: int) -> list[ChunkKey]:
        """Return some chunks of some namespaces, those first that were used longest ago."""
        return self._keys(self._of(namespaces), most)

    def newest_of(self, namespaces: Collection[bytes], most: int) -> list[ChunkKey]:
        """The same, those first that were used last."""
        rows = np.flatnonzero(self._of(namespaces))[::-1][:most].tolist()
        return [ChunkKey(key_at(self._bytes, row * ROW_BYTES)[0]) for row in rows]

    def leaves_of(self, namespaces: Collection[bytes], most: int) -> list[ChunkKey]:
        """The same, of those that no other chunk in the table follows."""
        return self._keys(
            self._of(namespaces) & (np.frombuffer(self._children, np.uint32) == 0), most
        )

    def kind(self, key: ChunkKey) -> tuple[int, Kind] | None:
        """Return in which directory a chunk lies, and its kind."""
        row = self._find(key)
        return None if row < 0 else self._kinds[self._kind_number(row)]

    def peek(self, key: ChunkKey) -> tuple[int, Row] | None:
        """Return a chunk's directory and row, which stays here."""
        row = self._find(key)
        return None if row < 0 else self._made(row)

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """Return the parent of a chunk; None where it has none, or is not here."""
        row = self._find(key)
        if row < 0:
            return None
        parent = self._parent_key(row)
        return None if parent == NO_PARENT else parent

    def take(self, key: ChunkKey) -> tuple[int, Row] | None:
        """Let a chunk leave the table, because it is used now or removed."""
        row = self._find(key)
        return None if row < 0 else self._leave(row)

    def pop_coldest(self) -> tuple[int, Row] | None:
        """Let the next chunk leave that is worth least; None when the table is empty.

        First goes what no lookup reaches: rows without a way up to a first chunk when the table
        was made, or with a newer row of the same key. Then, of the rows without a child in the
        table, the one that was used longest ago. Parents are never popped before their children,
        except on and below rings of forged parents.
        """
        while self._leaving:
            row = self._leaving.pop()
            if not self._gone[row]:
                return self._leave(row)
        while self._passed:
            row = heapq.heappop(self._passed)
            if not self._gone[row]:
                return self._leave(row)
        while self._next < len(self._gone):
            row = self._next
            self._next += 1
            if not self._gone[row] and not self._children[row]:
                return self._leave(row)
        return None

    def parts(self) -> list[tuple[int, Rows]]:
        """Return what is still here, by directory, as the constructor takes it."""
        there = np.frombuffer(self._gone, np.uint8) == 0
        parts: list[tuple[int, Rows]] = []
        for number, first, count in self._first_kinds:
            kinds = self._rows.array["kind"]
            array = self._rows.array[there & (kinds >= first) & (kinds < first + count)]
            array["kind"] -= np.uint32(first)
            parts.append((number, Rows(array, self._rows.kinds[first : first + count])))
        return parts

    def _tops(self, parents: Array, known: Callable[[ChunkKey], bool]) -> Array:
        """Return for each row without a parent here 0 if it can be reached, else 1."""
        tops = np.zeros(len(parents), np.int32)
        answers: dict[ChunkKey, bool] = {ChunkKey(NO_PARENT): True}
        for row in np.flatnonzero(parents < 0).tolist():
            key = self._parent_key(row)
            if key not in answers:
                answers[key] = known(key)
            tops[row] = not answers[key]
        return tops

    def _of(self, namespaces: Collection[bytes]) -> Array:
        """Tell of each row whether it is there and of one of some namespaces."""
        wanted = [number for each in namespaces for number in self._kinds_of.get(each, ())]
        of_them = np.isin(self._rows.array["kind"], wanted)
        there: Array = of_them & (np.frombuffer(self._gone, np.uint8) == 0)
        return there

    def _keys(self, chosen: Array, most: int) -> list[ChunkKey]:
        rows = np.flatnonzero(chosen)[:most].tolist()
        return [ChunkKey(key_at(self._bytes, row * ROW_BYTES)[0]) for row in rows]

    def _find(self, key: ChunkKey) -> int:
        row = self._index.find(key)
        return -1 if row >= 0 and self._gone[row] else row

    def _parent_key(self, row: int) -> ChunkKey:
        return ChunkKey(key_at(self._bytes, row * ROW_BYTES + _PARENT)[0])

    def _kind_number(self, row: int) -> int:
        return self._numbers[row * _ROW_NUMBERS + _KIND]

    def _made(self, row: int) -> tuple[int, Row]:
        return self._kinds[self._kind_number(row)][0], self._rows.row(row)

    def _leave(self, row: int) -> tuple[int, Row]:
        made = self._made(row)
        self._gone[row] = True
        self._count -= 1
        self._held_bytes[made[0]] -= made[1].nbytes
        self._kind_counts[self._kind_number(row)] -= 1
        parent = self._parents[row]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent] and not self._gone[parent] and parent < self._next:
                heapq.heappush(self._passed, parent)
        return made


def _merged(
    parts: Sequence[tuple[int, Rows]],
) -> tuple[Array, list[tuple[int, Kind]], list[tuple[int, int, int]]]:
    """Return all rows by their last use, their kinds with directories, and whose kinds are where.

    The last is (directory, first kind, count) for each part.
    """
    kinds: list[tuple[int, Kind]] = []
    where: list[tuple[int, int, int]] = []
    arrays: list[Array] = []
    for number, rows in parts:
        array = rows.array
        if kinds:
            array = array.copy()
            array["kind"] += np.uint32(len(kinds))
        where.append((number, len(kinds), len(rows.kinds)))
        kinds += [(number, kind) for kind in rows.kinds]
        arrays.append(array)
    if len(arrays) == 1:
        return arrays[0], kinds, where
    array = np.concatenate(arrays) if arrays else Rows.of([]).array
    return array[np.argsort(array["used_ms"], kind="stable")], kinds, where


def _unreachable(above: Array, repeated: list[int]) -> list[int]:
    """Return the rows that leave first, the first one last.

    ``above`` is the row of each row's parent, or with n rows n for the top and n + 1 for nowhere.
    The way up is found by pointer doubling (Hillis and Steele, 1986): after k steps every row
    whose way is at most 2^k long is at its end. Rings have none.
    """
    count = len(above)
    ends = np.concatenate([above, np.array([count, count + 1], above.dtype)])
    depth = np.ones(count + 2, np.int32)
    depth[count:] = 0
    under_way = count + 1
    while True:
        on_the_way = int(np.count_nonzero(ends < count))
        if on_the_way in (0, under_way):
            break
        under_way = on_the_way
        depth += depth[ends]
        ends = ends[ends]
    lost = ends[:count] != count
    lost[repeated] = True
    rows = np.flatnonzero(lost)
    # The deepest first; of one depth the oldest.
    return rows[np.lexsort((-rows, depth[rows]))].tolist()  # type: ignore[no-any-return]
