"""One request's load: chunks pass from their tier through DRAM slots into the engine's blocks.

::

    piece   waiting ──► coming (disk to DRAM) ──► ordered (plans out) ──► complete
               └───────────────┴───────── failed ──────┘
    prefix  [ complete | complete | complete | failed | whatever comes after does not count ]

DRAM chunks are pinned when the load begins. Disk chunks are pinned there and brought up a few at
a time, so a load may be larger than the room in DRAM. A piece gives its pins back when it is
complete.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvtier.cache.fill import Fill, Filler
from kvtier.cache.match import Ready
from kvtier.cache.planner import chunk_tokens_covered, load_moves, needed_groups
from kvtier.cache.plans import OpenPlans
from kvtier.cache.shapes import Shapes
from kvtier.constants import (
    LOAD_BYTES_INFLIGHT,
    LOAD_CHUNKS_INFLIGHT_MAX,
    LOAD_CHUNKS_INFLIGHT_MIN,
)
from kvtier.interfaces import Clock
from kvtier.obs.counters import Counters
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import DiskPlace
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.types import (
    Blocks,
    ChunkKey,
    Direction,
    LoadOutcome,
    Miss,
    MissReason,
    Move,
    Placement,
    Plan,
    ShardId,
    Slot,
    Tier,
)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What every load of a cache shares."""

    dram: DramTier
    disk: DiskTier | None
    filler: Filler | None
    lock: threading.Lock
    clock: Clock
    workers: tuple[Placement, ...]
    counters: Counters
    plans: OpenPlans
    shapes: Shapes


@dataclass(slots=True, eq=False)
class _Piece:
    """One chunk of the load."""

    chunk: int
    key: ChunkKey
    tokens: range
    groups: frozenset[int]
    tier: Tier = Tier.DRAM
    record: DramRecord | None = None
    dram_lease: Lease[Slot] | None = None
    disk_lease: Lease[DiskPlace] | None = None
    fill: Fill | None = None
    ordered: dict[ShardId, int] = field(default_factory=dict)
    sections: dict[ShardId, int] = field(default_factory=dict)
    plans_out: int = 0
    complete: bool = False

    def release(self) -> None:
        """Give the pins back."""
        for lease in (self.dram_lease, self.disk_lease):
            if lease is not None:
                lease.release()


class Load:
    """A load under way. ``poll`` it, hand its plans to the workers, until ``outcome`` is set.

    The engine keeps the blocks allocated until then, also after ``cancel``. Any thread may call.
    """

    def __init__(self, context: LoadContext, match: Ready, blocks: Blocks, deadline: float) -> None:
        self._context = context
        self._match = match
        self._blocks = blocks
        self._deadline = deadline
        self._layout = match.sequence.layout
        self._pieces = self._cut_pieces()
        self._failed_at = len(self._pieces)
        self._failure: MissReason | None = None
        self._waits_for_room = False
        self._coming_max = LOAD_CHUNKS_INFLIGHT_MIN
        self._outcome: LoadOutcome | None = None

    @property
    def outcome(self) -> LoadOutcome | None:
        """What came of it; None while a piece or a plan is still out."""
        return self._outcome

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
            self._bring()
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

    def of(self, root: bytes) -> bool:
        """Tell whether the load is of the namespace and epoch with that digest."""
        return self._match.sequence.root == root

    def pin(self) -> None:
        """Pin what the match found, as far as it is still there; under the cache's lock."""
        for index, piece in enumerate(self._pieces):
            record = self._context.dram.index.ready(piece.key)
            source = self._context.disk.ready(piece.key) if self._context.disk else None
            if record is not None:
                if not self._hold(index, piece, record):
                    break
            elif source is not None and self._context.disk is not None:
                piece.tier = Tier.DISK
                some = LOAD_BYTES_INFLIGHT // source.entry.nbytes
                few, many = LOAD_CHUNKS_INFLIGHT_MIN, LOAD_CHUNKS_INFLIGHT_MAX
                self._coming_max = min(max(few, some), many)
                piece.disk_lease = self._context.disk.index.lease([source])
            elif self._running_fill(piece.key) is not None:
                piece.tier = Tier.DISK
            else:
                self._fail_unread(index, piece)
                break

    def _cut_pieces(self) -> list[_Piece]:
        hits = self._match.hits
        size = self._layout.chunk_tokens
        cut = [
            (index, hit, chunk_tokens_covered(self._layout, index, self._blocks))
            for index, hit in enumerate(hits)
        ]
        # Windows end where the blocks do, which may be before the match does.
        end = max((index * size + tokens.stop for index, _, tokens in cut if tokens), default=0)
        pieces = (
            _Piece(index, hit.key, tokens, needed_groups(self._layout, index, end))
            for index, hit, tokens in cut
        )
        return [piece for piece in pieces if piece.tokens and piece.groups]

    def _hold(self, index: int, piece: _Piece, record: DramRecord) -> bool:
        """Pin what a piece is loaded from; False when that lacks a shard, which fails the piece."""
        shards = self._context.shapes.shards(self._layout)
        needed = [shard for shard in sorted(shards) if shard.group in piece.groups]
        fits = self._match.sequence.codec in (None, record.codec)
        if not (fits and record.places.keys() >= set(needed)):
            self._fail_from(index, MissReason.ABSENT)
            return False
        piece.record = record
        piece.dram_lease = self._context.dram.index.lease([record])
        piece.ordered = dict.fromkeys(needed, 0)
        shape = self._context.shapes.of(self._layout, piece.chunk, record.codec)
        piece.sections = {shard: shape.layouts[shard].sections for shard in needed}
        return True

    def _readable(self, source: DiskRecord | None) -> DiskRecord | None:
        """Pass on a record unless its codec is unknown here or too lossy for the namespace."""
        sequence, codecs = self._match.sequence, self._context.shapes.codecs
        if source is None or sequence.codec not in (None, source.codec):
            return None
        return source if codecs.readable(source.codec, sequence.namespace.fidelity) else None

    def _running_fill(self, key: ChunkKey) -> Fill | None:
        return self._context.filler.running(key) if self._context.filler else None

    def _bring(self) -> None:
        """Start the next chunks on their way up, in order, a few at a time."""
        coming = 0
        self._waits_for_room = False
        for index, piece in enumerate(self._pieces[: self._failed_at]):
            if not self._fill_is_good(index, piece):
                return
            if piece.tier is Tier.DRAM or piece.complete:
                continue
            coming += 1
            if coming > self._coming_max:
                return
            if piece.record is None and not self._bring_piece(index, piece):
                return

    def _fill_is_good(self, index: int, piece: _Piece) -> bool:
        """Draw the conclusion where a piece's fill has failed; False when the piece fails too."""
        fill = piece.fill
        if fill is None or fill.failure is None or self._all_ordered(piece):
            return True
        if fill.failure is MissReason.DEADLINE and fill.deadline < self._deadline:
            # Another load was in more of a hurry and gave it up; this one tries again.
            if not piece.plans_out and piece.dram_lease is not None:
                piece.dram_lease.release()
                piece.record = piece.fill = None
            return True
        self._fail_from(index, fill.failure)
        return False

    def _bring_piece(self, index: int, piece: _Piece) -> bool:
        """Find or start what brings a piece into DRAM; False when it has to wait or has failed."""
        filler, disk = self._context.filler, self._context.disk
        assert filler is not None, "a disk piece without a disk"
        assert disk is not None, "a disk piece without a disk"
        record = self._context.dram.index.ready(piece.key)
        if record is not None:
            return self._hold(index, piece, record)
        piece.fill = filler.running(piece.key)
        if piece.fill is None:
            source = self._readable(disk.ready(piece.key))
            if source is None or not disk.volume_of(source).answers:
                self._fail_unread(index, piece)
                return False
            if source.entry.nbytes > self._context.dram.capacity_bytes:
                self._fail_from(index, MissReason.NO_ROOM)
                return False
            if self._context.dram.index.get(piece.key) is not None:
                return False  # A store of the same chunk is under way; its record comes soon.
            piece.fill = self._start_fill(filler, disk, source)
        if piece.fill is None:
            self._waits_for_room = True  # Pieces on their way give theirs back.
            return False
        return self._hold(index, piece, piece.fill.record)

    def _start_fill(self, filler: Filler, disk: DiskTier, source: DiskRecord) -> Fill | None:
        """Start to read a chunk; what this load has done with gives way when DRAM is full of it."""
        dram = self._context.dram
        while (fill := filler.start(source, self._layout, self._deadline)) is None:
            done = (piece.key for piece in reversed(self._pieces) if piece.complete)
            if not dram.give_way(done, disk.find):
                return None
        return fill

    def _order(self) -> list[Plan]:
        """Make one plan of all sections that are verified and not ordered yet."""
        moves: list[Move] = []
        pieces: list[_Piece] = []
        for piece in self._pieces[: self._failed_at]:
            if piece.record is None or piece.complete:
                continue
            ready = {shard: self._ready_sections(piece, shard) for shard in piece.ordered}
            if not any(ready.values()):
                continue
            ordered = load_moves(
                self._layout,
                self._context.shapes.of(self._layout, piece.chunk, piece.record.codec),
                self._match.sequence.workers or self._context.workers,
                chunk=piece.chunk,
                groups=piece.groups,
                blocks=self._blocks,
                slots=piece.record.places.__getitem__,
                sections=ready.__getitem__,
            )
            for shard, sections in ready.items():
                piece.ordered[shard] = max(piece.ordered[shard], sections.stop)
            if ordered:  # None where no worker here reads these shards.
                moves += ordered
                piece.plans_out += 1
                pieces.append(piece)
        if not moves:
            return []
        plan = Plan(
            plan_id=self._context.plans.new_id(),
            direction=Direction.LOAD,
            deadline=self._deadline,
            moves=tuple(moves),
        )
        self._context.plans.open(plan, lambda reason: self._answered(pieces, reason))
        return [plan]

    def _ready_sections(self, piece: _Piece, shard: ShardId) -> range:
        total = piece.sections[shard]
        verified = total if piece.fill is None else piece.fill.verified[shard]
        return range(piece.ordered[shard], verified)

    def _answered(self, pieces: list[_Piece], reason: MissReason | None) -> None:
        for piece in pieces:
            piece.plans_out -= 1
            if reason is not None:
                self._fail_from(self._pieces.index(piece), reason)
        self._settle()

    def _expire(self) -> bool:
        """After the deadline, fail from the first piece of which something is to be ordered."""
        if self._context.clock.now() < self._deadline:
            return False
        for index, piece in enumerate(self._pieces[: self._failed_at]):
            if not piece.complete and not self._all_ordered(piece):
                no_room = self._waits_for_room and piece.record is None
                self._fail_from(index, MissReason.NO_ROOM if no_room else MissReason.DEADLINE)
                break
        return True

    def _fail_from(self, index: int, reason: MissReason) -> None:
        if index < self._failed_at:
            self._failed_at = index
            self._failure = reason

    def _fail_unread(self, index: int, piece: _Piece) -> None:
        """Fail a piece that no tier gives now; a disk may hold it and not answer."""
        held = self._context.disk is not None and self._context.disk.holds(piece.key)
        piece.tier = Tier.DISK if held else piece.tier
        self._fail_from(index, MissReason.UNAVAILABLE if held else MissReason.ABSENT)

    def _all_ordered(self, piece: _Piece) -> bool:
        return piece.record is not None and all(
            count == piece.sections[shard] for shard, count in piece.ordered.items()
        )

    def _settle(self) -> None:
        """Release what is over; set the outcome when everything is."""
        for index, piece in enumerate(self._pieces):
            if piece.plans_out or piece.complete:
                continue
            if index >= self._failed_at or self._all_ordered(piece):
                piece.complete = index < self._failed_at
                piece.release()
        open_pieces = self._pieces[: self._failed_at]
        if all(p.complete for p in open_pieces) and not any(p.plans_out for p in self._pieces):
            for piece in self._pieces:
                piece.release()
            self._outcome = self._conclude()

    def _conclude(self) -> LoadOutcome:
        valid = self._failed_at if self._windows_hold() else 0
        brought, lost = self._pieces[:valid], self._pieces[valid:]
        start = self._blocks.start_token
        end = self._end_token(brought[-1]) if brought else start
        by_tier: dict[Tier, int] = {}
        for piece in brought:
            by_tier[piece.tier] = by_tier.get(piece.tier, 0) + len(piece.tokens)
        misses: tuple[Miss, ...] = ()
        if lost and self._failure is not None:
            tokens = sum(len(piece.tokens) for piece in lost)
            misses = (Miss(self._pieces[self._failed_at].tier, self._failure, tokens),)
        codecs = self._context.shapes.codecs
        packed_by = {piece.record.codec for piece in brought if piece.record is not None}
        if not all(codecs.get(name).traits.exact for name in packed_by):
            self._match.sequence.lossy_chunks = brought[-1].chunk + 1
        counters, salt = self._context.counters, self._match.sequence.namespace.tenant_salt
        for tier, tokens in by_tier.items():
            counters.note_hit(salt, tier, tokens)
        for miss in misses:
            counters.note_miss(salt, miss.tier, miss.reason, miss.tokens)
        return LoadOutcome(start, end, by_tier, misses)

    def _windows_hold(self) -> bool:
        """Tell whether what was brought is a usable prefix.

        A load brings the windows of its end. Where it ended early, other chunks would be in the
        windows, whose KV was not asked for: then nothing counts. An even shorter prefix only
        needs windows from further before.
        """
        brought = self._pieces[: self._failed_at]
        return all(
            needed_groups(self._layout, piece.chunk, self._end_token(brought[-1])) <= piece.groups
            for piece in brought
        )

    def _end_token(self, piece: _Piece) -> int:
        return piece.chunk * self._layout.chunk_tokens + piece.tokens.stop
