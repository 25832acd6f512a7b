"""The pure planner alone, over tiers that change under it: many decisions, each looked at.

No cache, no I/O and no time: what a soak asks a million times a minute.
"""

from __future__ import annotations

import random
import time

from kvtier.cache.planner import (
    ChunkShape,
    chunk_shape,
    chunk_tokens_covered,
    first_needed,
    load_moves,
    needed_groups,
    usable_chunks,
)
from kvtier.codecs.raw import RawCodec
from kvtier.layout import shard_ids
from kvtier.types import Blocks, KVLayout, Move, Placement, ShardId, Slot
from tests.lib.cache_setup import BLOCK, CHUNK, LATENT, LAYOUT, SPLIT, STAGED, WINDOWED, ranks
from tests.lib.soak_report import report

STEPS = 12_000
CHUNKS = 6
MACHINES: tuple[tuple[KVLayout, tuple[Placement, ...]], ...] = (
    (LAYOUT, ranks(1)),
    (WINDOWED, ranks(1)),
    (LATENT, ranks(2)),
    (SPLIT, ranks(4)),
    (STAGED, ranks(1, 2)),
)


class PlannerDay:
    """One machine whose tiers gain and lose parts of chunks while a planner is asked."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.layout, self.workers = draws.choice(MACHINES)
        self.shape: ChunkShape = chunk_shape(self.layout, RawCodec())
        self.slots = {shard: Slot(0, size) for shard, size in self.shape.sizes.items()}
        self.groups = range(len(self.layout.groups))
        self.present = [frozenset(self.groups) for _ in range(CHUNKS)]
        self.planner_s = 0.0

    def step(self) -> None:
        """Change what is there, ask what is usable, and order one chunk of it."""
        draws = self.draws
        at = draws.randrange(CHUNKS)
        held = draws.random() < 0.8
        self.present[at] = frozenset(g for g in self.groups if held or draws.random() < 0.5)
        start = draws.randrange(CHUNKS * CHUNK // BLOCK) * BLOCK
        count = draws.randint(1, (CHUNKS * CHUNK - start) // BLOCK)
        ids = tuple(tuple(range(count)) for _ in self.groups)
        blocks = Blocks(start, ids, BLOCK)
        begun = time.process_time()
        usable = usable_chunks(self.layout, self.present)
        end = min(usable * CHUNK, start + count * BLOCK)
        chunk = min(start // CHUNK, CHUNKS - 1)
        groups = needed_groups(self.layout, chunk, end)
        moves: list[Move] = []
        if end > start:
            moves = load_moves(
                self.layout,
                self.shape,
                self.workers,
                chunk=chunk,
                groups=groups,
                end_token=end,
                blocks=blocks,
                slots=self.slots.__getitem__,
                sections=self.sections,
            )
        self.planner_s += time.process_time() - begun
        self.check(usable)
        if end > start:
            self.check_moves(moves, groups, blocks, chunk, end)

    def sections(self, shard: ShardId) -> range:
        return range(self.shape.layouts[shard].sections)

    def check(self, usable: int) -> None:
        """The prefix has all that the token after it attends to, and no longer one has."""
        for length in range(usable, CHUNKS + 1):
            whole = all(
                needed_groups(self.layout, chunk, length * CHUNK) <= self.present[chunk]
                for chunk in range(length)
            )
            assert whole == (length == usable), f"{usable} of {self.present} in {self.layout}"

    def check_moves(
        self, moves: list[Move], groups: frozenset[int], blocks: Blocks, chunk: int, end: int
    ) -> None:
        """Each needed shard goes to someone, in the blocks' own tokens and within its heads."""
        covered = chunk_tokens_covered(self.layout, chunk, blocks)
        needed = {shard for shard in shard_ids(self.layout) if shard.group in groups}
        assert {move.shard for move in moves} == needed
        for move in moves:
            group = self.layout.groups[move.shard.group]
            window = first_needed(group, end, BLOCK) - chunk * CHUNK
            tokens = range(max(covered.start, window), covered.stop)
            first = (chunk * CHUNK + tokens.start - blocks.start_token) // BLOCK
            assert (move.token_start, move.token_count) == (tokens.start, len(tokens))
            assert move.block_ids == tuple(range(first, first + len(tokens) // BLOCK))
            assert move.section_count == len(self.sections(move.shard))
            heads = move.heads
            assert 0 <= heads.shard_start <= heads.shard_start + heads.count
            assert heads.shard_start + heads.count <= move.layout.kv_heads
        assert len({(move.worker, move.shard) for move in moves}) == len(moves)


def test_every_decision_of_the_planner_is_one_that_holds(seed: int, scale: int) -> None:
    start = time.perf_counter()
    planner_s = 0.0
    for day in range(30 * scale):
        planner = PlannerDay(random.Random(seed + day))
        for _ in range(STEPS // 30):
            planner.step()
        planner_s += planner.planner_s
    steps = STEPS * scale
    seconds = time.perf_counter() - start
    report(
        "planner simulation",
        scale,
        steps=steps,
        steps_per_s=steps / seconds,
        planner_steps_per_s=steps / planner_s,
    )
