"""The pieces of a load: chunks on their way into blocks, and what of each is where."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.cache.below.fill import Fill, Hold
from kvtier.cache.match import Ready
from kvtier.cache.planner import chunk_tokens_covered, needed_groups
from kvtier.layout import stage_layer_start
from kvtier.tiers.dram import DramRecord
from kvtier.tiers.index import Lease
from kvtier.types import Blocks, ChunkKey, KVLayout, Miss, MissReason, ShardId, Slot, Tier


@dataclass(slots=True, eq=False)
class Piece:
    """One chunk of a load.

    Per shard: ``sections`` are all it has, ``ordered`` of them have gone out in plans, ``arrived``
    are in the engine's blocks. ``came``: it was seen that all are in DRAM.
    """

    chunk: int
    key: ChunkKey
    tokens: range
    groups: frozenset[int]
    tier: Tier = Tier.DRAM
    record: DramRecord | None = None
    dram_lease: Lease[Slot] | None = None
    below: Hold | None = None
    fill: Fill | None = None
    ordered: dict[ShardId, int] = field(default_factory=dict)
    arrived: dict[ShardId, int] = field(default_factory=dict)
    sections: dict[ShardId, int] = field(default_factory=dict)
    plans_out: int = 0
    complete: bool = False
    came: bool = False
    recoded: bool = False
    failed_in: set[str] = field(default_factory=set)
    early: list[tuple[ShardId, range]] = field(default_factory=list)

    @property
    def all_ordered(self) -> bool:
        """True when nothing of it is left to be ordered."""
        return self.record is not None and all(
            count == self.sections[shard] for shard, count in self.ordered.items()
        )

    @property
    def waiting_bytes(self) -> int:
        """What of it lies in DRAM and waits for the engine: all of it or nothing."""
        if self.record is None:
            return 0
        if not self.came:
            verified = self.sections if self.fill is None else self.fill.verified
            self.came = all(verified[shard] == count for shard, count in self.sections.items())
        return self.record.entry.nbytes if self.came else 0

    def ready_sections(self, shard: ShardId) -> range:
        """Return the sections that are verified and not ordered yet."""
        verified = self.sections[shard] if self.fill is None else self.fill.verified[shard]
        return range(self.ordered[shard], verified)

    def arrive(self, shard: ShardId, sections: range) -> None:
        """Note that sections are in the blocks. Plans for several workers may overtake others."""
        self.early.append((shard, sections))
        for each in sorted(self.early, key=lambda item: item[1].start):
            if self.arrived[each[0]] == each[1].start:
                self.arrived[each[0]] = each[1].stop
                self.early.remove(each)

    def forget_fill(self) -> None:
        """Begin anew, with another fill."""
        self._leave()
        if self.dram_lease is not None:
            self.dram_lease.release()
        self.record, self.dram_lease, self.came = None, None, False
        self.ordered, self.arrived, self.sections, self.early = {}, {}, {}, []

    def release(self) -> None:
        """Give the pins back, and wait for nothing any more."""
        self._leave()
        for lease in (self.dram_lease, self.below):
            if lease is not None:
                lease.release()

    def _leave(self) -> None:
        if self.fill is not None:
            self.fill.leave()
            self.fill = None


def cut_pieces(match: Ready, blocks: Blocks) -> list[Piece]:
    """Return what of a match the blocks cover and the tokens after them attend to."""
    layout = match.sequence.layout
    cut = [
        (index, hit, chunk_tokens_covered(layout, index, blocks))
        for index, hit in enumerate(match.hits)
    ]
    # Windows end where the blocks do, which may be before the match does.
    size = layout.chunk_tokens
    end = max((index * size + tokens.stop for index, _, tokens in cut if tokens), default=0)
    pieces = (
        Piece(index, hit.key, tokens, needed_groups(layout, index, end), hit.tier)
        for index, hit, tokens in cut
    )
    return [piece for piece in pieces if piece.tokens and piece.groups]


def missed(lost: Sequence[Piece], failed: Tier, reason: MissReason) -> tuple[Miss, ...]:
    """Return what did not come, by the tier that is to blame, the fastest first.

    The tier that failed is to blame for what lies in faster ones behind that too. What lies in
    slower ones counts for these: of the faster ones it is known as a miss from the lookup.
    """
    order = list(Tier)
    tokens: Counter[Tier] = Counter()
    for piece in lost:
        tokens[max(failed, piece.tier, key=order.index)] += len(piece.tokens)
    return tuple(Miss(tier, reason, tokens[tier]) for tier in sorted(tokens, key=order.index))


def layers_arrived(layout: KVLayout, pieces: Iterable[Piece]) -> int:
    """Return how many of the model's first layers are in the blocks, over all of the pieces."""
    every = sorted(layer for group in layout.groups for layer in group.layers)
    missing = [
        first
        for piece in pieces
        for shard in piece.sections
        if (first := _first_missing(layout, shard, piece)) is not None
    ]
    if any(piece.record is None and not piece.complete for piece in pieces):
        return 0
    return every.index(min(missing)) if missing else len(every)


def sections_below(layout: KVLayout, shard: ShardId, layer: int) -> int:
    """Return how many of a shard's first sections begin before one of the model's layers."""
    start = stage_layer_start(layout, shard.group, shard.stage)
    before = bisect_left(layout.groups[shard.group].layers, layer) - start
    return -(-max(0, before) // layout.section_layers)


def _first_missing(layout: KVLayout, shard: ShardId, piece: Piece) -> int | None:
    arrived = piece.arrived[shard]
    if arrived == piece.sections[shard]:
        return None
    start = stage_layer_start(layout, shard.group, shard.stage)
    return layout.groups[shard.group].layers[start + arrived * layout.section_layers]
