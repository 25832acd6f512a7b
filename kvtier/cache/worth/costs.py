"""What a cache knows of what loading and computing cost, and what it decides by that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.worth.cost import Judged, Price, Reason, Segment, judge, segments, split_at
from kvtier.cache.worth.cost_store import Kept, KeptPrefill, name_of
from kvtier.cache.worth.lines import Points, PrefillPoints
from kvtier.cache.worth.link import Link
from kvtier.cache.worth.patience import IN_VAIN, Patience, head_start_s
from kvtier.constants import LOAD_CHUNKS_INFLIGHT_MAX, READ_FIRST_BYTES
from kvtier.interfaces import Clock
from kvtier.obs.stats import CostStats, LinkStats
from kvtier.types import KVLayout, LoadOutcome, Moved, Tier


@dataclass(frozen=True, slots=True)
class Terms:
    """On what a load is waited for: see ``Patience``. Tokens before ``start_token`` are quick."""

    start_token: int
    head_start_s: float | None
    free_s: float = 0.0
    due_s: float = 0.0


@dataclass(frozen=True)
class Choice:
    """What of a match's tokens ``start_token .. stop_token`` to load, and why the rest not.

    ``judged`` covers them, in order, as far as the match does. With ``split_token`` the load begins
    there, and tokens before it are computed meanwhile.
    """

    start_token: int
    judged: tuple[Judged, ...] = ()
    terms: Terms | None = None
    split_token: int | None = None

    @cached_property
    def end_token(self) -> int:
        """Where the tokens to load end: ``start_token`` when nothing is to be loaded."""
        loaded = [each.segment.end_token for each in self.judged if each.loaded]
        return max(loaded, default=self.start_token)

    @property
    def left(self) -> list[Judged]:
        """Runs that are not worth loading."""
        return [each for each in self.judged if not each.loaded]


class Costs:
    """Measures and decides for one cache. What the engine calls takes the cache's lock.

    ``worth`` is what a second of computing is worth in seconds of waiting for a load.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        shapes: Shapes,
        places: Mapping[Tier, str],
        *,
        worth: float = 1.0,
    ) -> None:
        """``places`` are the paths or URLs of the tiers below DRAM."""
        self._lock = lock
        self._clock = clock
        self._shapes = shapes
        self._worth = worth
        self._names = {tier: name_of(place) for tier, place in places.items()}
        self._links = {tier: Link() for tier in places}
        self._moves: dict[str, Points] = {}
        self._prefill = PrefillPoints()
        self._computer = ""
        self._left: set[tuple[Tier, str]] = set()
        self._decisions: Counter[tuple[Tier, Reason]] = Counter()
        self._saved_s = self._lost_s = 0.0
        self._kept = Kept()

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool = False
    ) -> Choice:
        """Decide what of the match's tokens to load. Counts and begins nothing; never waits.

        With ``split``, the caller can compute tokens while those behind them are loaded.
        """
        with self._lock:
            sequence = match.sequence
            asked_s, sequence.asked_s = sequence.asked_s, None
            spent_s = 0.0 if asked_s is None else self._clock.now() - asked_s
            layout = sequence.layout
            tokens = range(start_token, min(end_token, match.tokens))
            runs = segments(match.hits, tokens, layout.chunk_tokens, self._sizes(layout))
            recompute = self._recompute
            patience_s = recompute(start_token, max(tokens.stop, start_token)) or 0.0
            prices = [self._price(run, patience_s) for run in runs]
            judged = tuple(judge(runs, prices, recompute))
            chunk = layout.chunk_tokens
            cut = split_at(judged, chunk, recompute) if split and self._worth <= 1 else None
            if cut is None:
                return Choice(start_token, judged, self._terms(judged, spent_s))
            free_s = (recompute(start_token, cut) or 0.0) - spent_s
            return Choice(start_token, judged, Terms(cut, None, free_s), cut)

    def bound_lookup(self, sequence: Sequence, start_token: int) -> None:
        """Note that a request could begin and waits for what a remote says; call it while it does.

        From the first call on it waits about as long as computing its tokens from ``start_token``
        on would take, and then the remote is left out. The load that follows has so much less time.
        """
        with self._lock:
            if sequence.asked_s is not None or sequence.pending_until is None:
                return
            now = sequence.asked_s = self._clock.now()
            seconds = self._recompute(start_token, sequence.token_count)
            if seconds is not None:
                sequence.pending_until = min(sequence.pending_until, now + IN_VAIN * seconds)

    def serve(self, computer: str, tokens: int, seconds: float) -> None:
        """Name what computes, model and device, and what so many tokens took there at a try.

        What was measured of it before a restart is better; the first steps are best.
        """
        with self._lock:
            if computer != self._computer:
                self._computer, self._prefill = computer, PrefillPoints()
            self._prefill.guess(tokens, seconds)
            self._adopt_prefill()

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        """Learn from a step that did little else than compute so many tokens of one sequence.

        Several sequences count as one at their average place.
        """
        if tokens > 0 and seconds > 0:
            with self._lock:
                self._prefill.observe(start_token, tokens, seconds)

    def recompute_s(self, start_token: int, end_token: int) -> float | None:
        """Return how long computing these tokens takes; None while that is unknown."""
        with self._lock:
            return self._prefill.seconds(start_token, end_token)

    # From here on under the cache's lock.

    def link(self, tier: Tier) -> Link:
        """Return what is measured of a tier's transfers into DRAM."""
        return self._links[tier]

    def note_moved(self, moved: Moved) -> None:
        """Learn from what a worker has moved from DRAM into its pool."""
        if moved.nbytes > 0 and moved.seconds > 0:
            self._moves.setdefault(moved.codec, Points()).observe(moved.nbytes, moved.seconds)

    def note_choice(self, choice: Choice) -> None:
        """Count an admitted request's verdicts, and remember them."""
        for each in choice.judged:
            run = each.segment
            self._decisions[run.tier, each.reason] += 1
            if each.reason in {Reason.FASTER, Reason.UNKNOWN}:
                self._left.discard((run.tier, run.codec))
            else:
                self._left.add((run.tier, run.codec))

    def note_loaded(self, outcome: LoadOutcome, seconds: float) -> None:
        """Count what a load has saved, or cost, by the side of computing what it brought."""
        computing_s = self._prefill.seconds(outcome.start_token, outcome.end_token)
        if computing_s is not None:
            self._saved_s += max(computing_s - seconds, 0.0)
            self._lost_s += max(seconds - computing_s, 0.0)

    def adopt(self, kept: Kept) -> None:
        """Go on from what was measured before a restart, where nothing was measured since."""
        self._kept = kept
        for tier, link in self._links.items():
            link.adopt(kept.links.get(self._names[tier], ()))
        for codec, points in kept.moves.items():
            self._moves.setdefault(codec, Points(points))
        self._adopt_prefill()

    def kept(self) -> Kept:
        """Return what the next start is to go on from."""
        links = {self._names[tier]: link.kept() for tier, link in self._links.items()}
        moves = {codec: points.kept() for codec, points in self._moves.items()}
        mine = KeptPrefill(self._prefill.kept(), self._prefill.growth)
        others = {name: each for name, each in self._kept.prefill.items() if name != self._computer}
        prefill = {**others, self._computer: mine} if self._computer and mine.points else others
        return Kept({**self._kept.links, **links}, {**self._kept.moves, **moves}, prefill)

    def patience(self, choice: Choice | None) -> Patience | None:
        """Return on what terms a load that begins now is waited for; None: to its deadline."""
        if choice is None or choice.terms is None or self._prefill.line is None:
            return None
        terms = choice.terms
        return Patience(
            self._clock.now(),
            terms.start_token,
            choice.end_token,
            self._prefill,
            self._worth,
            terms.head_start_s,
            terms.free_s,
            terms.due_s,
        )

    @property
    def saved_s(self) -> float:
        """How much longer computing would have taken than loads did, by estimate."""
        return self._saved_s

    @property
    def lost_s(self) -> float:
        """How much longer loads took than computing would have taken, by estimate."""
        return self._lost_s

    def stats(self) -> CostStats:
        """Return the fitted values and the counts, now."""
        line = self._prefill.line
        links = {
            tier: LinkStats(link.line.intercept, 1 / link.line.slope)
            for tier, link in self._links.items()
            if link.line is not None and link.line.slope > 0
        }
        moves = {
            codec: 1 / points.line.slope
            for codec, points in self._moves.items()
            if points.line is not None and points.line.slope > 0
        }
        return CostStats(
            links=links,
            moves_bytes_per_s=moves,
            prefill_s_per_token=None if line is None else line.intercept,
            prefill_s_per_token_squared=None if line is None else line.slope,
            decisions={(tier, reason.value): n for (tier, reason), n in self._decisions.items()},
        )

    def _adopt_prefill(self) -> None:
        known = self._kept.prefill.get(self._computer)
        if known is not None and not self._prefill.known:
            self._prefill.adopt(known.points, known.growth)

    def _recompute(self, start_token: int, end_token: int) -> float | None:
        seconds = self._prefill.seconds(start_token, end_token)
        return None if seconds is None else self._worth * seconds

    def _sizes(self, layout: KVLayout) -> Callable[[int, str], tuple[int, int]]:
        known: dict[tuple[bool, str], tuple[int, int]] = {}

        def size(chunk: int, codec: str) -> tuple[int, int]:
            place = (chunk == 0, codec)
            if place not in known:
                known[place] = measured(chunk, codec)
            return known[place]

        def measured(chunk: int, codec: str) -> tuple[int, int]:
            shape = self._shapes.of(layout, chunk, codec)
            # What comes in one read shows nothing before all of it is there.
            sections = sum(
                len(each.section_offsets) if each.shard_bytes >= READ_FIRST_BYTES else 1
                for each in shape.geometries.values()
            )
            return shape.chunk_bytes, sections

        return size

    def _price(self, run: Segment, patience_s: float) -> Price:
        moves = self._moves.get(run.codec)
        move_s = moves.line.at(run.nbytes) if moves is not None and moves.line else 0.0
        left = (run.tier, run.codec) in self._left
        if run.tier is Tier.DRAM:
            return Price(move_s if moves is not None else None, move_s, left_before=left)
        link = self.link(run.tier)
        link_s = link.seconds(run.nbytes)
        return Price(
            None if link_s is None else link_s + move_s,
            move_s,
            silent=link.silent(self._clock.now(), patience_s),
            idle=link.idle,
            left_before=left,
        )

    def _terms(self, judged: tuple[Judged, ...], spent_s: float) -> Terms | None:
        """Return the terms of the load that is decided on; None when all of it lies in DRAM.

        ``spent_s`` were waited for lookups already.
        """
        slow = [each for each in judged if each.loaded and each.segment.tier is not Tier.DRAM]
        if not slow:
            return None
        start, end = slow[0].segment.start_token, slow[-1].segment.end_token
        head_start, sections = None, sum(each.segment.sections for each in slow)
        recompute_s = self._recompute(start, end)
        if slow[0].reason is Reason.RETRY and recompute_s is not None:
            line = self.link(slow[0].segment.tier).line
            head_start = head_start_s(recompute_s, sections, line.intercept if line else 0.0)
        # As many chunks as are on their way together may show their first section together.
        share = min(LOAD_CHUNKS_INFLIGHT_MAX / max(sections, 1), 1.0)
        due_s = share * sum(each.load_s or 0.0 for each in slow)
        return Terms(start, head_start, -spent_s, due_s)
