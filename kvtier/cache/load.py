"""One request's load: chunks pass from their tier through DRAM slots into the engine's blocks.

::

    piece   waiting ──► coming up to DRAM ──► ordered (plans out) ──► complete
               └───────────────┴────── failed ────┘
    prefix  [ complete | complete | complete | failed | whatever comes after does not count ]

DRAM chunks are pinned when the load begins. Chunks of lower tiers are brought up a few at a time,
so a load may be larger than the room in DRAM; those on disk are pinned there meanwhile. A piece
gives its pins back when it is complete; one that others lend counts if they are there then.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvtier.cache.below.below import Below
from kvtier.cache.match import Ready
from kvtier.cache.pieces import Piece, cut_pieces, layers_arrived, missed, sections_below
from kvtier.cache.planner import first_needed, load_moves
from kvtier.cache.plans import OpenPlans
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.spans import record_load
from kvtier.cache.worth.costs import Choice, Costs
from kvtier.cache.worth.progress import gives_up
from kvtier.constants import (
    LOAD_BYTES_AHEAD,
    LOAD_BYTES_INFLIGHT,
    LOAD_CHUNKS_INFLIGHT_MAX,
    LOAD_CHUNKS_INFLIGHT_MIN,
    LOAD_PLAN_BYTES,
    LOAD_PLANS_MAX,
)
from kvtier.interfaces import Clock
from kvtier.obs.counters import Counters
from kvtier.obs.spans import Spans
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import (
    Blocks,
    Direction,
    LoadOutcome,
    MissReason,
    Move,
    Placement,
    Plan,
    ShardId,
    Tier,
)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What every load of a cache shares."""

    dram: DramTier
    below: Below
    lock: threading.Lock
    clock: Clock
    workers: tuple[Placement, ...]
    counters: Counters
    plans: OpenPlans
    shapes: Shapes
    costs: Costs
    spans: Spans | None = None


class Load:
    """A load under way. ``poll`` it, hand its plans to the workers, until ``outcome`` is set.

    The engine keeps the blocks allocated until then, also after ``cancel``. Any thread may call.
    """

    def __init__(
        self,
        context: LoadContext,
        match: Ready,
        blocks: Blocks,
        deadline: float,
        choice: Choice | None = None,
    ) -> None:
        self._context = context
        self._match, self._blocks, self._deadline = match, blocks, deadline
        self._begun_s = context.clock.now()
        self._layout = match.sequence.layout
        self._pieces = cut_pieces(match, blocks)
        self._failed_at = len(self._pieces)
        self._failure: MissReason | None = None
        self._waits_for_room = False
        self._coming_max = LOAD_CHUNKS_INFLIGHT_MIN
        self._patience = context.costs.patience(choice)
        self._outcome: LoadOutcome | None = None

    @property
    def outcome(self) -> LoadOutcome | None:
        """What came of it; None while a piece or a plan is still out."""
        return self._outcome

    @property
    def layers_ready(self) -> int:
        """How many of the model's first layers are in the blocks, for all of what still counts.

        Grows while the load goes on, unless the prefix gets shorter; what is more than this many
        layers up may still be written to.
        """
        with self._context.lock:
            return layers_arrived(self._layout, self._pieces[: self._failed_at])

    @property
    def empty(self) -> bool:
        """True when the blocks cover nothing of the match."""
        return not self._pieces

    def poll(self) -> list[Plan]:
        """Go on as far as possible without waiting; return the plans that became ready."""
        with self._context.lock:
            if self._outcome is not None:
                return []
            self._expire()
            self.bring()
            plans = self._order()
            self._settle()
            return plans

    def cancel(self) -> None:
        """Order nothing more. ``outcome`` follows when the workers have answered what is out."""
        with self._context.lock:
            self.end(MissReason.CANCELLED)

    def end(self, reason: MissReason) -> None:
        """Order nothing more, and let nothing that was loaded count; under the cache's lock."""
        if self._outcome is None:
            self._fail_from(0, reason)
            self._settle()

    def keep_deadline(self) -> None:
        """End at the deadline even if nobody polls any more; under the cache's lock."""
        if self._outcome is None and self._expire():
            self._settle()

    @property
    def sequence(self) -> Sequence:
        """What it is a load of."""
        return self._match.sequence

    def pin(self) -> None:
        """Pin what the match found, as far as it is still there; under the cache's lock."""
        below = self._context.below
        for index, piece in enumerate(self._pieces):
            record = self._context.dram.index.ready(piece.key)
            if record is not None:
                if not self._hold(index, piece, record):
                    break
                continue
            source = below.find(self._match.sequence, piece.chunk)
            if source is not None:
                piece.tier = source.origin.tier
                some = LOAD_BYTES_INFLIGHT // below.nbytes(source, self._layout)
                few, many = LOAD_CHUNKS_INFLIGHT_MIN, LOAD_CHUNKS_INFLIGHT_MAX
                self._coming_max = min(max(few, some), many)
                piece.below = source.hold()
            elif below.filler.running(piece.key):
                piece.tier = below.tier_of(piece.key) or Tier.DISK
            else:
                self._fail_unread(index, piece)
                break

    def _hold(self, index: int, piece: Piece, record: DramRecord) -> bool:
        """Pin what a piece is loaded from; False when that lacks a shard, which fails the piece."""
        shards = self._context.shapes.shards(self._layout)
        needed = [shard for shard in sorted(shards) if shard.group in piece.groups]
        if not (self.sequence.takes(record.codec) and record.places.keys() >= set(needed)):
            self._fail_from(index, MissReason.ABSENT)
            return False
        piece.record = record
        piece.dram_lease = self._context.dram.index.lease([record])
        piece.ordered, piece.arrived = dict.fromkeys(needed, 0), dict.fromkeys(needed, 0)
        shape = self._context.shapes.of(self._layout, piece.chunk, record.codec)
        piece.sections = {shard: shape.layouts[shard].sections for shard in needed}
        return True

    def bring(self) -> None:
        """Start the next chunks on their way up, a few at a time; under the cache's lock."""
        if self._context.clock.now() >= self._deadline:
            return  # A read that is overdue as it begins would be taken for a tier that hangs.
        coming = ahead_bytes = 0
        self._waits_for_room = False
        for index, piece in enumerate(self._pieces[: self._failed_at]):
            if piece.complete:
                continue
            if not self._fill_is_good(index, piece):
                return
            if piece.tier is Tier.DRAM:
                continue
            waiting_bytes = piece.waiting_bytes
            ahead_bytes += waiting_bytes
            coming += not waiting_bytes or ahead_bytes > LOAD_BYTES_AHEAD
            if coming > (1 if self._patience and self._patience.doubtful else self._coming_max):
                return
            if piece.record is None and not self._bring_piece(index, piece):
                return

    def _fill_is_good(self, index: int, piece: Piece) -> bool:
        """Draw the conclusion where a piece's fill has failed; False when the piece fails too."""
        fill = piece.fill
        if fill is None or fill.failure is None or piece.all_ordered:
            return True
        # Another load was in more of a hurry, or left it; or it lies there in another codec.
        hurried = fill.failure is MissReason.DEADLINE and fill.deadline < self._deadline
        recoded = fill.failure is MissReason.CODEC and not piece.recoded
        if hurried or recoded or fill.failure is MissReason.CANCELLED:
            if not piece.plans_out:
                piece.recoded |= recoded
                piece.forget_fill()
            return True
        piece.failed_in.add(fill.source.origin.place)
        if self._context.below.find(self._match.sequence, piece.chunk, piece.failed_in) is None:
            self._fail_from(index, fill.failure)
            return False
        if not piece.plans_out:
            piece.forget_fill()  # Another tier has it too.
        return True

    def _bring_piece(self, index: int, piece: Piece) -> bool:
        """Find or start what brings a piece into DRAM; False when it has to wait or has failed."""
        below, dram = self._context.below, self._context.dram
        record = dram.index.ready(piece.key)
        if record is not None:
            return self._hold(index, piece, record)
        piece.fill = below.filler.follow(piece.key)
        if piece.fill is None:
            source = below.find(self._match.sequence, piece.chunk, piece.failed_in)
            if source is None:
                self._fail_unread(index, piece)
                return False
            if below.nbytes(source, self._layout) > dram.capacity_bytes:
                self._fail_from(index, MissReason.NO_ROOM)
                return False
            if dram.index.get(piece.key) is not None:
                return False  # A store of the same chunk is under way; its record comes soon.
            # What this load has done with gives way when DRAM is full of it.
            done = [each.key for each in reversed(self._pieces) if each.complete]
            piece.fill = below.start(source, self._match.sequence, self._deadline, done)
        if piece.fill is None:
            self._waits_for_room = True  # Pieces on their way give theirs back.
            return False
        piece.tier = piece.fill.source.origin.tier
        return self._hold(index, piece, piece.fill.record)

    def _order(self) -> list[Plan]:
        """Order all sections that are verified and not ordered yet, the model's first ones first.

        One plan, or several where there is much: then the first layers are there before the last.
        """
        left = [p for p in self._pieces[: self._failed_at] if p.record and not p.all_ordered]
        ready_bytes = sum(piece.record.entry.nbytes for piece in left if piece.record is not None)
        parts = min(1 + ready_bytes // LOAD_PLAN_BYTES, LOAD_PLANS_MAX) if left else 0
        layers = 1 + max(layer for group in self._layout.groups for layer in group.layers)
        ends = (-(-layers * part // parts) for part in range(1, parts + 1))
        return [plan for end in ends if (plan := self._order_below(end, left)) is not None]

    def _order_below(self, layer: int, left: list[Piece]) -> Plan | None:
        """Make one plan of all sections before a layer that are verified and not ordered yet."""
        moves: list[Move] = []
        pieces: list[Piece] = []
        sections: list[tuple[Piece, ShardId, range]] = []
        for piece in left:
            assert piece.record is not None, "it has something to order"
            ready = {shard: piece.ready_sections(shard) for shard in piece.ordered}
            for shard, some in ready.items():
                stop = sections_below(self._layout, shard, layer)
                ready[shard] = range(some.start, max(some.start, min(some.stop, stop)))
            if not any(ready.values()):
                continue
            ordered = load_moves(
                self._layout,
                self._context.shapes.of(self._layout, piece.chunk, piece.record.codec),
                self._match.sequence.workers or self._context.workers,
                chunk=piece.chunk,
                groups=piece.groups,
                end_token=self._end_token(self._pieces[-1]),
                blocks=self._blocks,
                slots=piece.record.places.__getitem__,
                sections=ready.__getitem__,
            )
            moved = {move.shard for move in ordered}
            for shard, some in ready.items():
                piece.ordered[shard] = max(piece.ordered[shard], some.stop)
                if shard in moved:
                    sections.append((piece, shard, some))
                elif some:  # No worker here reads this shard.
                    piece.arrived[shard] = piece.ordered[shard]
            if ordered:
                moves += ordered
                piece.plans_out += 1
                pieces.append(piece)
        if not moves:
            return None
        number = self._context.plans.new_id()
        plan = Plan(number, Direction.LOAD, self._deadline, tuple(moves))
        self._context.plans.open(plan, lambda reason: self._answered(pieces, sections, reason))
        return plan

    def _answered(
        self,
        pieces: list[Piece],
        sections: list[tuple[Piece, ShardId, range]],
        reason: MissReason | None,
    ) -> None:
        for piece in pieces:
            piece.plans_out -= 1
            lost = piece.record is None or not self._context.dram.intact(piece.record)
            if why := reason or (MissReason.UNAVAILABLE if lost else None):
                self._fail_from(self._pieces.index(piece), why)
        if reason is None:
            for piece, shard, some in sections:
                piece.arrive(shard, some)
        self._settle()

    def _expire(self) -> bool:
        """Fail from the first piece not ordered, after the deadline or when it is not worth it."""
        now = self._context.clock.now()
        late, counts = now >= self._deadline, self._pieces[: self._failed_at]
        if not late and not gives_up(self._patience, now, counts, self._layout.chunk_tokens):
            return False
        for index, piece in enumerate(self._pieces[: self._failed_at]):
            if not piece.complete and not piece.all_ordered:
                no_room = self._waits_for_room and piece.record is None
                reason = MissReason.DEADLINE if late else MissReason.COST
                self._fail_from(index, MissReason.NO_ROOM if no_room else reason)
                break
        return True

    def _fail_from(self, index: int, reason: MissReason) -> None:
        if index < self._failed_at:
            self._failed_at = index
            self._failure = reason

    def _fail_unread(self, index: int, piece: Piece) -> None:
        """Fail a piece that no tier gives now; one may hold it and not answer."""
        holder = self._context.below.tier_of(piece.key)
        piece.tier = holder or piece.tier
        self._fail_from(index, MissReason.UNAVAILABLE if holder else MissReason.ABSENT)

    def _settle(self) -> None:
        """Release what is over; set the outcome when everything is."""
        for index, piece in enumerate(self._pieces):
            if piece.plans_out or piece.complete:
                continue
            if index >= self._failed_at or piece.all_ordered:
                piece.complete = index < self._failed_at
                piece.release()
        open_pieces = self._pieces[: self._failed_at]
        if all(p.complete for p in open_pieces) and not any(p.plans_out for p in self._pieces):
            for piece in self._pieces:
                piece.release()
            self._outcome = self._conclude()
            seconds = self._context.clock.now() - self._begun_s
            if self.sequence.codec is None:  # A payload is no tokens that were not computed.
                self._context.costs.note_loaded(self._outcome, seconds)
            record_load(self._context.spans, self._outcome, seconds)

    def _conclude(self) -> LoadOutcome:
        valid = self._failed_at if self._windows_hold() else 0
        brought, lost = self._pieces[:valid], self._pieces[valid:]
        start = self._blocks.start_token
        end = self._end_token(brought[-1]) if brought else start
        by_tier: dict[Tier, int] = {}
        for piece in brought:
            tier = self.sequence.came_from(piece.chunk, piece.tier)
            by_tier[tier] = by_tier.get(tier, 0) + len(piece.tokens)
        failure = self._failure if lost else None
        misses = missed(lost, self._pieces[self._failed_at].tier, failure) if failure else ()
        packed_by = {piece.record.codec for piece in brought if piece.record is not None}
        if not all(self._context.shapes.codecs.get(name).traits.exact for name in packed_by):
            self._match.sequence.lossy_chunks = brought[-1].chunk + 1
        outcome = LoadOutcome(start, end, by_tier, misses)
        self._context.counters.note_load(self.sequence.namespace.tenant_salt, outcome)
        return outcome

    def _windows_hold(self) -> bool:
        """Tell whether what was brought is a usable prefix.

        A load fills the windows of its end. Where it ended early, they begin earlier, at tokens
        nobody asked for: then nothing counts, unless those were there, or in a block that is.
        """
        brought = self._pieces[: self._failed_at]
        if not brought:
            return True
        start, size = self._blocks.start_token, self._blocks.block_tokens
        ends = self._end_token(brought[-1]), self._end_token(self._pieces[-1])
        return all(
            len({max(start, first_needed(group, end, size)) for end in ends}) == 1
            for group in self._layout.groups
        )

    def _end_token(self, piece: Piece) -> int:
        return piece.chunk * self._layout.chunk_tokens + piece.tokens.stop
