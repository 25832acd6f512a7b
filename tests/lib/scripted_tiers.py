"""A cache and its worker in one, that move real bytes when and as a test says.

Copies happen as late as allowed: a block that was given away too early is seen as wrong bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worth.cost import Judged, Reason, Segment
from kvtier.cache.worth.costs import Choice
from kvtier.keys import namespace_digest
from kvtier.testing.pools import TorchPool
from kvtier.types import (
    Blocks,
    ChunkHit,
    ChunkKey,
    Direction,
    Features,
    HeadSlice,
    LoadOutcome,
    Miss,
    MissReason,
    Move,
    Namespace,
    Plan,
    Result,
    ShardId,
    ShardLayout,
    Slot,
    Tier,
)
from tests.lib.toy_model import DIM, PLANES

Tokens = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(eq=False)
class _Job:
    """A plan under way. ``polls`` of the worker pass before it is carried out."""

    plan: Plan
    polls: int
    keys: list[ChunkKey]
    load: ScriptedLoad | None = None


@dataclass(eq=False)
class ScriptedLoad:
    """A load of whole chunks in one plan."""

    tiers: ScriptedTiers
    match: Ready
    blocks: Blocks
    polled: bool = False
    cancelled: bool = False
    outcome: LoadOutcome | None = None

    def poll(self) -> list[Plan]:
        self.tiers.called("load.poll")
        if self.polled:
            return []
        self.polled = True
        return [self.tiers.load_plan(self)]

    def cancel(self) -> None:
        self.cancelled = True
        if not self.polled:
            self.polled = True
            start = self.blocks.start_token
            self.outcome = LoadOutcome(start, start)


@dataclass
class ScriptedCosts:
    """Loads what a test does not say to leave."""

    #: Tokens from which on nothing is worth a load.
    worth_tokens: int = 1 << 30
    #: Where loads begin while what comes before is computed, for who can do that.
    split_token: int | None = None
    prefills: list[tuple[float, int, float]] = field(default_factory=list)
    #: Tokens of sequences whose lookups are waited for, and where what is unknown begins.
    bounded: list[tuple[int, int]] = field(default_factory=list)
    on_call: Callable[[str], None] = lambda _: None

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool = False
    ) -> Choice:
        self.on_call("choose")
        end = min(end_token, match.tokens)
        cut = min(max(start_token, self.worth_tokens), end)
        tier = match.hits[0].tier
        parts = [(start_token, cut, Reason.FASTER), (cut, end, Reason.SLOWER)]
        judged = (
            Judged(Segment(first, stop, tier, "raw", 1, 1), reason, 1.0, 2.0)
            for first, stop, reason in parts
            if stop > first
        )
        front = self.split_token if split and start_token < (self.split_token or 0) < cut else None
        return Choice(start_token, tuple(judged), split_token=front)

    def bound_lookup(self, sequence: Sequence, start_token: int) -> None:
        self.on_call("bound_lookup")
        self.bounded.append((sequence.token_count, start_token))

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        self.on_call("note_prefill")
        self.prefills.append((start_token, tokens, seconds))


@dataclass
class ScriptedTiers:
    """Holds chunks by key. Every knob may be turned at any time."""

    pool: TorchPool
    tier: Tier = Tier.DRAM
    store_polls: int = 0
    load_polls: int = 0
    #: Lookups that answer "ask later" before each answer.
    pending_lookups: int = 0
    #: Chunk positions whose load fails, leaving garbage behind.
    failing_chunks: set[int] = field(default_factory=set)
    refuse_stores: bool = False
    #: Chunks that one store takes, at most.
    store_chunks_max: int = 1 << 30
    #: What is left out passes through a staging area, and has its turn soon.
    crowded: bool = False
    #: Methods that raise.
    broken: set[str] = field(default_factory=set)
    chunks: dict[ChunkKey, Tokens] = field(default_factory=dict)
    admissions: list[tuple[int, int, int]] = field(default_factory=list)
    prefetches: list[tuple[int, int]] = field(default_factory=list)
    lookups: int = 0
    chunk_reads: int = 0
    raised: int = 0
    #: Told of every call.
    on_call: Callable[[str], None] = lambda _: None
    loads: list[ScriptedLoad] = field(default_factory=list)
    choices: list[Choice | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._open: dict[int, _Job] = {}
        self._storing: set[ChunkKey] = set()
        self._asked: dict[int, int] = {}
        self._plan_id = 0
        self.costs = ScriptedCosts(on_call=self.called)
        self._planes = [
            self.pool.layer_view(0, layer, part).numpy()[:, :, 0] for layer, part in PLANES
        ]

    def called(self, method: str) -> None:
        self.on_call(method)
        if method in self.broken:
            self.raised += 1
            raise OSError(f"{method} is broken")

    # The cache's side.

    def sequence(self, namespace: Namespace, *, features: Features = Features()) -> Sequence:  # noqa: B008
        self.called("sequence")
        return Sequence(namespace, namespace_digest(namespace), features=features)

    def match(self, sequence: Sequence) -> Ready | Pending:
        self.called("match")
        self.lookups += 1
        asked = self._asked.get(id(sequence), 0)
        self._asked[id(sequence)] = asked + 1
        if asked < self.pending_lookups:
            return Pending(0.0)
        hits = []
        for key in sequence.chunk_keys:
            if key not in self.chunks:
                break
            hits.append(ChunkHit(key, self.tier))
        return Ready(sequence, tuple(hits))

    def note_admission(
        self, match: Ready, start_token: int, end_token: int, choice: Choice | None = None
    ) -> None:
        del choice
        self.called("note_admission")
        self.admissions.append((start_token, end_token, match.tokens))

    def begin_load(
        self, match: Ready, blocks: Blocks, *, choice: Choice | None = None
    ) -> ScriptedLoad | None:
        self.called("begin_load")
        if not match.hits:
            return None
        self.choices.append(choice)
        load = ScriptedLoad(self, match, blocks)
        self.loads.append(load)
        return load

    def prefetch(self, match: Ready, *, start_token: int) -> bool:
        self.called("prefetch")
        self.prefetches.append((start_token, match.tokens))
        return True

    def load_plan(self, load: ScriptedLoad) -> Plan:
        plan = self._plan(Direction.LOAD, load.blocks.block_ids[0])
        self._open[plan.plan_id] = _Job(plan, self.load_polls, [], load)
        return plan

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        self.called("begin_store")
        size = sequence.chunk_tokens // blocks.block_tokens
        keys, moved = list[ChunkKey](), list[int]()
        sequence.refused = None
        for chunk in chunks:
            key = sequence.chunk_keys[chunk]
            if key in self.chunks or key in self._storing:
                continue
            if self.refuse_stores or len(keys) >= self.store_chunks_max:
                sequence.refused = MissReason.CROWDED if self.crowded else MissReason.NO_ROOM
                break
            first = (chunk - chunks.start) * size
            moved += blocks.block_ids[0][first : first + size]
            keys.append(key)
        if not keys:
            return None
        self._storing.update(keys)
        plan = self._plan(Direction.STORE, moved)
        self._open[plan.plan_id] = _Job(plan, self.store_polls, keys)
        return plan

    def finish(self, results: Iterable[Result]) -> None:
        self.called("finish")
        for result in results:
            job = self._open.pop(result.plan_id)
            self._storing.difference_update(job.keys)
            if job.load is not None:
                self._conclude(job.load, ok=result.ok)

    def store_done(self, plan_id: int) -> bool:
        self.called("store_done")
        return plan_id not in self._open

    # The worker's side.

    def execute(self, plan: Plan) -> None:
        self.called("execute")
        self._jobs.append(self._open[plan.plan_id])

    def poll(self) -> list[Result]:
        self.called("worker.poll")
        results = []
        for job in list(self._jobs):
            job.polls -= 1
            if job.polls < 0:
                self._jobs.remove(job)
                self._carry_out(job)
                results.append(Result(job.plan.plan_id, 0, ok=True))
        return results

    @property
    def idle(self) -> bool:
        """True when no plan is open."""
        return not self._open

    def _carry_out(self, job: _Job) -> None:
        if job.load is None:
            (blocks,) = {move.block_ids for move in job.plan.moves}
            size = len(blocks) // len(job.keys)
            for index, key in enumerate(job.keys):
                self.chunks[key] = self._read(blocks[index * size : (index + 1) * size])
            return
        for chunk, token, block in self._targets(job.load):
            data = self.chunks.get(job.load.match.hits[chunk].key)
            size = job.load.blocks.block_tokens
            if chunk in self.failing_chunks or data is None:
                self._write(block, np.full((size, len(PLANES) * DIM), 7, np.float32))
            else:
                self._write(block, data[token : token + size])

    def _targets(self, load: ScriptedLoad) -> Iterator[tuple[int, int, int]]:
        """Yield (chunk, token within it, block) for what the match and the blocks both cover."""
        blocks, size = load.blocks, load.match.sequence.chunk_tokens
        for index, block in enumerate(blocks.block_ids[0]):
            position = blocks.start_token + index * blocks.block_tokens
            if position < load.match.tokens:
                yield position // size, position % size, block

    def _conclude(self, load: ScriptedLoad, *, ok: bool) -> None:
        start = end = load.blocks.start_token
        misses: tuple[Miss, ...] = ()
        for chunk, _, _ in self._targets(load):
            gone = load.match.hits[chunk].key not in self.chunks
            if chunk in self.failing_chunks or gone or load.cancelled or not ok:
                misses = (Miss(self.tier, MissReason.IO_ERROR, 1),)
                break
            end += load.blocks.block_tokens
        size = load.match.sequence.chunk_tokens
        self.chunk_reads += -(-end // size) - start // size
        by_tier = {self.tier: end - start} if end > start else {}
        load.outcome = LoadOutcome(start, end, by_tier, misses)

    def _plan(self, direction: Direction, block_ids: Iterable[int]) -> Plan:
        self._plan_id += 1
        layout = ShardLayout(len(PLANES) // 2, 1, DIM, DIM, "float32", 4)
        heads = HeadSlice(0, 0, 1)
        move = Move(
            0,
            "scripted",
            ShardId(0, 0, 0),
            layout,
            Slot(0, 0),
            0,
            0,
            1,
            heads,
            0,
            0,
            0,
            tuple(block_ids),
        )
        return Plan(self._plan_id, direction, float("inf"), (move,))

    def _read(self, blocks: Iterable[int]) -> Tokens:
        planes = [plane[list(blocks)].reshape(-1, DIM) for plane in self._planes]
        return np.concatenate(planes, axis=1)

    def _write(self, block: int, data: Tokens) -> None:
        for index, plane in enumerate(self._planes):
            plane[block] = data[:, index * DIM : (index + 1) * DIM]
