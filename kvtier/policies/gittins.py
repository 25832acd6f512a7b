"""Evict what is least worth its place, by reuse times learned online (the Gittins index).

Blocks are told apart by kind: how often they were accessed (1, 2, 3 or more), the turn of the
session, whether two or more branches share them, and the caller's hint. ``reuse`` learns for each
kind how long it takes until the next access; the block to go is the leaf with the lowest index.

Blocks of one kind that one request accessed lie on one path and age alike. They form a group, and
only the deepest block of a group can be a leaf. Groups whose deepest block is a leaf stand in bins
by kind and age, so choosing a victim is a look at the bins: their number does not grow with that
of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import floor, log2, nan
from typing import Final

from kvtier.errors import ConfigError
from kvtier.policies.blocks import COUNT, GHOST, HELD, LOST, NONE, SHARED, Blocks
from kvtier.policies.groups import LOST_BIN, Groups
from kvtier.policies.reuse import (
    BUCKET_S_MIN,
    BUCKETS,
    BUCKETS_PER_OCTAVE,
    EDGES_S,
    ReuseTimes,
    bucket_of,
)
from kvtier.types import ChunkKey, Entry, Features, Hint

#: Ghosts kept: as many as blocks are held, and at least this many.
GHOSTS_MIN: Final = 65_536
# Index tables are computed anew after so many accesses: few at first, at last a share of them all.
_LEARN_ACCESSES_FIRST: Final = 256
_LEARN_ACCESSES: Final = 8192
_LEARN_ACCESSES_MAX: Final = 65_536
_LEARN_SHARE: Final = 64
# An instant takes at least this long, so that accesses have an order where the clock has none.
_INSTANT_S_MIN: Final = BUCKET_S_MIN
# Little experience says nothing of small differences: at first what was used last is preferred,
# by this power of the age, and half as much after so many accesses.
_RECENCY_POWER: Final = 0.5
_RECENCY_ACCESSES: Final = 2000
# A ranking of the bins by age serves until this share of the held blocks has left.
_RANKING_SHARE: Final = 512
_NEW_BINS_MAX: Final = 4096
_LEVELS_MAX: Final = 4096

# Kind of a block: (accesses - 1) * _PER_COUNT + code * 2 + shared, with code = turn * 3 + hint.
_TURNS: Final = (0, 1, 2, 3, 3, 3, 4)
_HINTS: Final = {Hint.NONE: 0, Hint.WILL_CONTINUE: 1, Hint.DONE: 2}
_PER_COUNT: Final = 2 * 5 * 3
_KINDS: Final = 3 * _PER_COUNT
# Kinds that differ in the turn alone: there are many turns, and few accesses in late ones.
_POOLS: Final = tuple(
    kind // _PER_COUNT * 6 + kind % _PER_COUNT // 2 % 3 * 2 + kind % 2 for kind in range(_KINDS)
)


class Gittins:
    """An ``EvictionPolicy``. Owned by its tier and called under the tier's lock.

    ``pinned`` tells which chunks must not leave now. Accesses to one key at one instant are one
    access, with the features of the last. An admission is an access.
    """

    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"policy capacity is {capacity_bytes}; it must be above 0 bytes")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._held_count = 0
        self._pinned = pinned
        self._blocks = Blocks()
        self._groups = Groups(self._blocks, _KINDS)
        self._times = ReuseTimes(_POOLS)
        self._clock = nan
        self._accesses = 0
        self._learn_at = _LEARN_ACCESSES_FIRST
        self._accesses_total = 0
        # The features of the latest access.
        self._features: Features | None = None
        self._code = 0
        # The bucket of the time since ``_bucket_for``: a request finds many of one age.
        self._bucket_for = nan
        self._bucket = 0
        self._levels: dict[float, int] = {}
        self._scores: dict[int, float] = {}
        # A heap of scores and bins, for the ages at some instant not long ago.
        self._ranking: list[tuple[float, int]] = []
        self._ranking_left = 0
        # The path that is being accessed at this instant, and by level and kind its groups, each
        # with the topmost row.
        self._top = self._bottom = NONE
        self._path: dict[int, tuple[int, int]] = {}

    def worth(self, entry: Entry) -> float:
        """Return what a hit on the entry saves, per byte. Subclasses may differ."""
        return 1.0 / max(entry.nbytes, 1)

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """See ``EvictionPolicy.admit``."""
        blocks = self._blocks
        row = blocks.row_of.get(entry.key)
        assert row is None or not blocks.state[row] & HELD, "admit of a key that is held"
        if entry.nbytes > self.capacity_bytes:
            return None
        if now != self._clock:
            self._advance(now)
        victims: list[ChunkKey] = []
        if self.used_bytes + entry.nbytes > self.capacity_bytes:
            leaving = self._choose(entry)
            if leaving is None:
                return None
            for row in leaving:
                victims.append(blocks.keys[row])
                self._bury(row)
            if blocks.ghost_count > GHOSTS_MIN:
                self._trim_ghosts()
        self._take_in(entry)
        return victims

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``EvictionPolicy.touch``."""
        row = self._blocks.row_of.get(key)
        if row is None or not self._blocks.state[row] & HELD:
            return
        if now != self._clock:
            self._advance(now)
        if features is not self._features:
            self._note_features(features)
        self._access(row, self._code)

    def remove(self, key: ChunkKey) -> None:
        """See ``EvictionPolicy.remove``. What descended from the key becomes first to leave."""
        blocks, groups = self._blocks, self._groups
        row = blocks.row_of.get(key)
        if row is None or not blocks.state[row] & HELD:
            return
        self._end_path()
        groups.leave(row)
        parent = blocks.unlink(row)
        self.used_bytes -= blocks.nbytes[row]
        self._held_count -= 1
        for lost in blocks.below(row):
            groups.leave(lost)
            blocks.state[lost] |= LOST
            groups.new(lost)
        if parent >= 0 and blocks.state[parent] & HELD:
            groups.refile_if_deepest(parent)
        elif parent >= 0:
            blocks.entomb(parent)
        if blocks.child[row] < 0:
            blocks.entomb(row)
        else:
            blocks.stand_in(row)
        self._trim_ghosts()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        blocks, groups = self._blocks, self._groups
        held = [row for row in blocks.row_of.values() if blocks.state[row] & HELD]
        total = sum(blocks.nbytes[row] for row in held)
        if total != self.used_bytes or total > self.capacity_bytes:
            raise AssertionError(f"used {self.used_bytes}, held {total}, of {self.capacity_bytes}")
        if len(held) != self._held_count:
            raise AssertionError(f"{len(held)} blocks are held, {self._held_count} are counted")
        if blocks.ghost_count > max(GHOSTS_MIN, len(held)):
            raise AssertionError(f"{blocks.ghost_count} ghosts are too many")
        parents = {blocks.parent[row] for row in held}
        for row in held:
            if (blocks.child[row] >= 0) != (row in parents):
                raise AssertionError(f"row {row}: its children are not what is held")
        groups.check_integrity(held)

    def _note_features(self, features: Features) -> None:
        self._features = features
        turn = _TURNS[min(max(features.turn, 1), len(_TURNS)) - 1]
        self._code = turn * 3 + _HINTS[features.hint]

    def _advance(self, now: float) -> None:
        """Begin a new instant. Time that stands still or runs backwards counts as little time."""
        elapsed = now - self._clock
        self._clock = now
        groups = self._groups
        # A jump beyond all buckets says no more than one into the last, and costs no precision.
        groups.now += min(elapsed, EDGES_S[-1]) if elapsed > _INSTANT_S_MIN else _INSTANT_S_MIN
        self._bucket_for = nan
        self._end_path()
        if self._ranking_left <= 0 or len(groups.new_bins) > _NEW_BINS_MAX:
            self._ranking.clear()
            groups.new_bins.clear()  # The next ranking looks at all bins.
        if self._accesses >= self._learn_at:
            self._times.learn(self._accesses, groups.now)
            self._accesses_total += self._accesses
            self._accesses = 0
            share = min(self._accesses_total // _LEARN_SHARE, _LEARN_ACCESSES_MAX)
            self._learn_at = max(share, min(2 * self._learn_at, _LEARN_ACCESSES))
            self._scores.clear()
            self._ranking.clear()

    def _access(self, row: int, code: int) -> None:
        """Count an access, or give the one of this instant other features; move to its group."""
        blocks, started = self._blocks, self._times.started
        now, accessed = self._groups.now, blocks.accessed[row]
        state, kind_before = blocks.state[row], blocks.kind[row]
        count = state & COUNT
        is_new = accessed != now or not count
        if is_new:
            if count:
                if accessed != self._bucket_for:
                    self._bucket_for = accessed
                    self._bucket = bucket_of(now - accessed)
                self._times.reused[kind_before * BUCKETS + self._bucket] += 1.0
            if count < COUNT:
                count += 1
            blocks.accessed[row] = now
            self._accesses += 1
        kind = (count - 1) * _PER_COUNT + code * 2 + (1 if state & SHARED else 0)
        if not is_new:
            if kind == kind_before and not state & LOST:
                if self._top >= 0 and blocks.parent[self._top] == row:
                    self._top = row
                return
            started[kind_before] -= 1.0
        started[kind] += 1.0
        blocks.kind[row] = kind
        group = blocks.group[row]
        if group >= 0 and self._groups.leave(row):
            self._forget_group(group)
        blocks.state[row] = state & ~(LOST | COUNT) | count
        self._join(row)

    def _join(self, row: int) -> None:
        """Put a row that has no group into one of the path of this instant."""
        blocks, groups = self._blocks, self._groups
        base = blocks.level[row] * _KINDS + blocks.kind[row]
        top = self._top
        if top >= 0 and blocks.parent[top] == row:
            self._top = row
            place = self._path.get(base)
            if place is not None:
                group, topmost = place
                if blocks.group[topmost] == group and blocks.up[topmost] < 0:
                    # The common case: the next row above, of the same kind.
                    blocks.group[row] = group
                    blocks.up[row] = NONE
                    blocks.down[row] = topmost
                    blocks.up[topmost] = row
                    self._path[base] = group, row
                    return
        elif self._bottom >= 0 and blocks.parent[row] == self._bottom:
            self._bottom = row
            group, _ = self._path.get(base, (NONE, NONE))
            if group >= 0:
                groups.put_below(group, row)
                return
        else:
            self._path.clear()
            self._top = self._bottom = row
        self._path[base] = groups.new(row), row

    def _take_in(self, entry: Entry) -> None:
        blocks = self._blocks
        row = blocks.row(entry.key)
        if blocks.state[row] & GHOST:
            blocks.revive(row)
        blocks.attach(row, entry)
        blocks.level[row] = self._level(entry)
        self._held_count += 1
        self.used_bytes += entry.nbytes
        if entry.features is not self._features:
            self._note_features(entry.features)
        self._access(row, self._code)
        parent = blocks.parent[row]
        if parent >= 0 and blocks.group[parent] != blocks.group[row]:
            self._groups.refile_if_deepest(parent)

    def _level(self, entry: Entry) -> int:
        """Return the worth of an entry in half octaves."""
        worth = self.worth(entry)
        level = self._levels.get(worth)
        if level is None:
            if len(self._levels) >= _LEVELS_MAX:
                self._levels.clear()
            level = self._levels[worth] = min(max(floor(2 * log2(worth) + 0.5), -128), 127)
        return level

    def _choose(self, entry: Entry) -> list[int] | None:
        """Pick rows to leave until the entry fits, and take them out of tree and groups.

        None: it cannot fit, and everything is as it was.
        """
        blocks, groups = self._blocks, self._groups
        guard = blocks.row_of.get(entry.parent, NONE) if entry.parent is not None else NONE
        used_before = self.used_bytes
        limit = self.capacity_bytes - entry.nbytes
        leaving: list[int] = []
        groups.begin()
        ranked_at = NONE
        while self.used_bytes > limit:
            if not self._ranking:
                if ranked_at == len(leaving):
                    break  # Nothing more may leave.
                ranked_at = len(leaving)
                self._rank()
            if groups.new_bins:
                self._rank_new_bins()
            if self._ranking and not self._drain(self._ranking[0][1], guard, limit, leaving):
                heappop(self._ranking)
        self._ranking_left -= len(leaving)
        if self.used_bytes <= limit:
            groups.commit()
            return leaving
        groups.roll_back()
        groups.new_bins.clear()
        self._ranking.clear()
        self.used_bytes = used_before
        return None

    def _drain(self, where: int, guard: int, limit: int, leaving: list[int]) -> bool:
        """Take rows from a bin's groups until ``limit`` holds or there is another bin to look at.

        False: the bin has no more. ``guard`` stays: it is the parent of what comes in.
        """
        blocks, groups = self._blocks, self._groups
        group = groups.first(where)
        while group >= 0:
            after = groups.after[group]
            row = groups.deepest[group]
            while row >= 0 and row != guard and groups.bin_of[group] == where:
                if self._pinned(blocks.keys[row]):
                    break
                groups.pluck(row)
                leaving.append(row)
                self.used_bytes -= blocks.nbytes[row]
                if self.used_bytes <= limit or groups.new_bins:
                    return True
                row = groups.deepest[group]
            # What was filed meanwhile stands last in its bin, perhaps in this one.
            group = groups.after[group] if groups.bin_of[group] == where else after
        return False

    def _rank(self) -> None:
        """Order all bins by score, after their groups have moved on to the bins of their ages."""
        groups = self._groups
        groups.age()
        groups.new_bins = list(groups.bins)
        self._rank_new_bins()
        self._ranking_left = self._held_count // _RANKING_SHARE

    def _rank_new_bins(self) -> None:
        scores = self._scores
        for where in self._groups.new_bins:
            score = scores.get(where)
            if score is None:
                score = scores[where] = self._score(where)
            heappush(self._ranking, (score, where))
        self._groups.new_bins.clear()

    def _score(self, where: int) -> float:
        if where == LOST_BIN:
            return -1.0
        level, at = divmod(where, _KINDS * BUCKETS)
        power = _RECENCY_POWER / (1.0 + self._accesses_total / _RECENCY_ACCESSES)
        octaves = level / 2 - power * (at % BUCKETS) / BUCKETS_PER_OCTAVE
        return self._times.index[at] * float(2.0**octaves)

    def _bury(self, row: int) -> None:
        """Make a ghost of a row that was plucked."""
        blocks = self._blocks
        if blocks.up[row] < 0:
            if self._path:
                self._forget_group(blocks.group[row])
            self._groups.free(blocks.group[row])
        parent = blocks.parent[row]
        blocks.entomb(row)
        self._held_count -= 1
        if parent >= 0 and blocks.child[parent] < 0 and not blocks.state[parent] & (HELD | GHOST):
            blocks.entomb(parent)

    def _trim_ghosts(self) -> None:
        blocks = self._blocks
        while blocks.ghost_count > max(GHOSTS_MIN, self._held_count):
            row = blocks.oldest_ghost
            if blocks.state[row] & COUNT:
                bucket = bucket_of(self._groups.now - blocks.accessed[row])
                self._times.censored[blocks.kind[row] * BUCKETS + bucket] += 1.0
            blocks.forget(row)

    def _forget_group(self, group: int) -> None:
        for base, (known, _) in list(self._path.items()):
            if known == group:
                del self._path[base]

    def _end_path(self) -> None:
        self._top = self._bottom = NONE
        self._path.clear()
