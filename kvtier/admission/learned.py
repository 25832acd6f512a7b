"""Write what has a fair chance to be read before it must leave, as learned online.

Chunks are told apart by *kind*: the turn of the session, the caller's hint, where the prompt left
what was below (``start``), how far behind that the chunk stands (``run``), and how often it was
offered. A chunk with a parent that was offered at the same instant continues its run.

For each kind two decayed counts are kept: offers whose fate is known, and those of them after which
the chunk was accessed again before it would have left. They are counted for what was refused as
well, so a kind that is never written still learns.

- *Would have left*: the residence time is the mean age at which chunks leave, as ``left`` tells; it
  grows while nothing leaves, so a tier that is hardly written any more is tried again. An
  offer's fate is also taken for known after a few times the usual delay until reuse, or when too
  many are waited for, long before anything has left; a reuse that comes later still counts.
- *A fair chance*: at least ``FAIR_SHARE`` of the share of offers that are followed by any access,
  however late. Measured against this, a tier that holds what is asked for writes nearly all, and
  one that is too small for its traffic writes what it can keep long enough.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from math import inf, nan
from typing import Final

from kvtier.admission.everything import require_capacity
from kvtier.types import ChunkKey, Entry, Features, Hint

#: A kind is written if its odds of reuse in time are this share of the odds of any reuse,
FAIR_SHARE: Final = 0.75
#: and at least these: fewer reads than one in fifty writes pay for no write.
ODDS_MIN: Final = 0.02
#: Refused chunks remembered: as many as are held below, at least this many.
REFUSED_MIN: Final = 65_536
#: Chunks watched in all, but for these few: what is written beyond that is written unwatched, and
#: less of what was refused is remembered. Each takes some 150 bytes, so all of them 310 MB.
WATCHED_MAX: Final = 2_000_000

# An offer that was not followed by an access within this many mean delays counts as fruitless.
_PATIENCE: Final = 3.0
# Observations after which a mean follows at its slowest.
_MEAN_OVER: Final = 500
_HALF_LIFE_OFFERS: Final = 20_000
_FADE_EVERY: Final = 2000
_BORROWED: Final = 30.0

_TURNS: Final = (0, 1, 2, 3, 3, 3, 4)
_HINTS: Final = {hint: number for number, hint in enumerate(Hint)}
_STARTS: Final = 5
_RUNS: Final = 4
_OFFERS: Final = 3
_KINDS: Final = 5 * len(_HINTS) * _STARTS * _RUNS * _OFFERS
_POOLS: Final = 2 * len(_HINTS) * _RUNS * _OFFERS

# What became of the latest offer of a chunk: not known, counted as fruitless, settled for good.
_OPEN: Final = 0
_FRUITLESS: Final = 1
_LOST: Final = 2  # fruitless, because it left
_SETTLED: Final = 3


def _kind(features: Features, start: int, run: int, offers: int) -> int:
    turn = _TURNS[min(max(features.turn, 1), len(_TURNS)) - 1]
    start_octaves = min((start.bit_length() + 1) // 2, _STARTS - 1)
    run_octaves = min((run.bit_length() + 1) // 2, _RUNS - 1)
    kind = turn * len(_HINTS) + _HINTS[features.hint]
    kind = (kind * _STARTS + start_octaves) * _RUNS + run_octaves
    return kind * _OFFERS + min(offers, _OFFERS) - 1


def _pool(kind: int) -> int:
    """Return what a kind has in common with others: first turn or later, hint, run, offers."""
    kind, offers = divmod(kind, _OFFERS)
    kind, run = divmod(kind, _RUNS)
    turn, hint = divmod(kind // _STARTS, len(_HINTS))
    return (((turn > 0) * len(_HINTS) + hint) * _RUNS + run) * _OFFERS + offers


_POOL_OF: Final = tuple(map(_pool, range(_KINDS)))


class _Odds:
    """Per kind, per pool of kinds and in all: offers of known fate, and the fruitful of them."""

    def __init__(self) -> None:
        self._known = [0.0] * (_KINDS + _POOLS + 1)
        self._fruitful = [0.0] * (_KINDS + _POOLS + 1)
        self._until_fade = _FADE_EVERY
        self._offers = self._followed = 0.0

    def note(self, kind: int, known: float, fruitful: float) -> None:
        """Count an offer whose fate is known, or correct one that was counted."""
        for at in (kind, _KINDS + _POOL_OF[kind], -1):
            self._known[at] += known
            self._fruitful[at] += fruitful

    def note_offer(self) -> None:
        """Count an offer, whatever becomes of it."""
        self._offers += 1.0
        self._until_fade -= 1
        if not self._until_fade:
            self._fade()

    def note_followed(self) -> None:
        """Count an offer that was followed by an access, however late."""
        self._followed += 1.0

    def are_fair(self, kind: int) -> bool:
        """Tell whether a chunk of a kind is worth a write. A kind starts from what is like it."""
        known, fruitful, pool = self._known, self._fruitful, _KINDS + _POOL_OF[kind]
        odds = (fruitful[-1] + 2.0) / (known[-1] + 2.0)
        for at in (pool, kind):
            odds = (fruitful[at] + _BORROWED * odds) / (known[at] + _BORROWED)
        return odds >= max(ODDS_MIN, FAIR_SHARE * self._followed / max(self._offers, 1.0))

    def _fade(self) -> None:
        share = 0.5 ** (_FADE_EVERY / _HALF_LIFE_OFFERS)
        self._known = [count * share for count in self._known]
        self._fruitful = [count * share for count in self._fruitful]
        self._offers *= share
        self._followed *= share
        self._until_fade = _FADE_EVERY


class _Mean:
    """A mean that follows what it is told; infinite before the first observation."""

    def __init__(self) -> None:
        self.value = inf
        self._count = 0

    def note(self, value: float) -> None:
        self._count = min(self._count + 1, _MEAN_OVER)
        self.value = value if self._count == 1 else self.value + (value - self.value) / self._count


class Learned:
    """An ``AdmissionPolicy``. Owned by its tier and called under the tier's lock.

    Watches what it said True to until it leaves, and remembers what it refused and what left; see
    ``REFUSED_MIN`` and ``WATCHED_MAX``. A child is refused as long as its parent is.
    """

    def __init__(self, capacity_bytes: int) -> None:
        require_capacity(capacity_bytes)
        self._odds = _Odds()
        self._residence_s = _Mean()
        self._delay_s = _Mean()
        # Rows of columns: instant of the latest access, kind of the latest offer and its fate.
        self._accessed = array("d")
        self._kind = array("H")
        self._fate = bytearray()
        self._free: list[int] = []
        self._below: dict[ChunkKey, int] = {}
        self._refused: OrderedDict[ChunkKey, int] = OrderedDict()  # latest offer last
        # Offers of unknown fate, oldest first: row and instant. One that was followed by an access
        # or by another offer is known for its instant, and passed over.
        self._open_rows: deque[int] = deque()
        self._open_since: deque[float] = deque()
        self._now = self._left_at = nan
        self._run_key: ChunkKey | None = None
        self._run_start = 0
        self._fair: dict[int, bool] = {}  # of kinds, as judged at this instant

    @property
    def remembered_count(self) -> int:
        """Chunks that are not below and are remembered."""
        return len(self._refused)

    @property
    def watched_count(self) -> int:
        """Chunks of which anything is known: 11 bytes each, and places in a dict and a queue."""
        return len(self._refused) + len(self._below)

    def offer(self, entry: Entry, now: float) -> bool:
        """See ``AdmissionPolicy.offer``."""
        if now != self._now:
            self._begin_instant(now)
        key = entry.key
        if self._run_key is None or entry.parent != self._run_key:
            self._run_start = entry.position
        self._run_key = key
        offers = 1
        row = self._refused.pop(key, None)
        if row is not None:
            self._note_access(row, now, self._residence_until(now))
        else:
            row = self._below.pop(key, None)  # Of what was written, and was lost unnoticed.
        if row is not None:
            offers = self._kind[row] % _OFFERS + 2
        start = self._run_start
        kind = _kind(entry.features, start, max(entry.position - start, 0), offers)
        self._odds.note_offer()
        is_wanted = entry.parent not in self._refused and self._is_fair(kind)
        if is_wanted and row is None and self.watched_count >= WATCHED_MAX:
            return True
        row = self._opened(row, kind, now)
        if is_wanted:
            self._below[key] = row
        else:
            self._remember(key, row)
        return is_wanted

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:  # noqa: ARG002
        """See ``AdmissionPolicy.touch``."""
        row = self._below.get(key)
        if row is None:
            row = self._refused.pop(key, None)
            if row is None:
                return
            self._below[key] = row
        self._note_access(row, now, inf)

    def left(self, key: ChunkKey, now: float) -> None:
        """See ``AdmissionPolicy.left``."""
        row = self._below.pop(key, None)
        if row is None:
            return
        if now > self._accessed[row]:  # Else it made room for others of its own request.
            self._residence_s.note(now - self._accessed[row])
            self._left_at = now
        fate = self._fate[row]
        if fate == _OPEN:
            self._odds.note(self._kind[row], 1.0, 0.0)
        if fate != _SETTLED:
            self._fate[row] = _LOST
        self._remember(key, row)

    def _is_fair(self, kind: int) -> bool:
        fair = self._fair.get(kind)
        if fair is None:
            fair = self._fair[kind] = self._odds.are_fair(kind)
        return fair

    def _begin_instant(self, now: float) -> None:
        """Take the fate of offers for known that were made too long ago to be fruitful."""
        self._now = now
        self._run_key = None
        self._fair.clear()
        oldest = now - min(self._residence_until(now), _PATIENCE * self._delay_s.value)
        count_max = max(REFUSED_MIN, self.watched_count)
        rows, since = self._open_rows, self._open_since
        while rows and (since[0] < oldest or len(rows) > count_max):
            row, offered_at = rows.popleft(), since.popleft()
            if self._fate[row] == _OPEN and self._accessed[row] == offered_at:
                self._fate[row] = _FRUITLESS
                self._odds.note(self._kind[row], 1.0, 0.0)

    def _residence_until(self, now: float) -> float:
        """Return how long a chunk stays: the mean, or longer where nothing has left for longer."""
        mean_s = self._residence_s.value
        return mean_s if mean_s == inf else max(mean_s, now - self._left_at)

    def _opened(self, row: int | None, kind: int, now: float) -> int:
        """Return a row, a new one for None, whose fate is open from now on."""
        if row is None and self._free:
            row = self._free.pop()
        if row is None:
            row = len(self._fate)
            self._accessed.append(now)
            self._kind.append(kind)
            self._fate.append(_OPEN)
        self._accessed[row] = now
        self._kind[row] = kind
        self._fate[row] = _OPEN
        self._open_rows.append(row)
        self._open_since.append(now)
        return row

    def _note_access(self, row: int, now: float, in_time_s: float) -> None:
        """Settle the latest offer: it was followed by an access, in time or not."""
        fate, accessed = self._fate[row], self._accessed[row]
        self._accessed[row] = now
        if fate == _SETTLED:
            return
        self._fate[row] = _SETTLED
        self._odds.note_followed()
        if fate == _LOST:
            return
        delay_s = max(0.0, now - accessed)
        is_fruitful = delay_s <= in_time_s
        if is_fruitful:
            self._delay_s.note(delay_s)
        self._odds.note(self._kind[row], float(fate == _OPEN), float(is_fruitful))

    def _remember(self, key: ChunkKey, row: int) -> None:
        self._refused[key] = row
        held = len(self._below)
        limit = max(REFUSED_MIN, min(held, WATCHED_MAX - held))
        if len(self._refused) > limit:
            _, row = self._refused.popitem(last=False)
            self._fate[row] = _SETTLED
            self._free.append(row)
