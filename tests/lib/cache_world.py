"""An engine, its workers and its blocks beside a real cache on virtual time.

KV is a tag per block, layer section and head group, which follows from the key of its chunk. So a
block that holds another chunk's KV, or was written after it had another owner, is recognised.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from kvtier.cache.cache import Cache
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.interfaces import Clock
from kvtier.types import (
    Blocks,
    ChunkKey,
    Direction,
    GroupKind,
    KVGroup,
    KVLayout,
    LoadOutcome,
    MissReason,
    Move,
    Namespace,
    Placement,
    Plan,
    Result,
    Tier,
)

CHUNK, BLOCK = 8, 4
SECTIONS = 2
HEAD_GROUPS = 2
SECTION_STRIDE = 4096
TAG_BYTES = 16
LAYOUT = KVLayout(
    (KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=4, v_dim=4, dtype="float32"),),
    chunk_tokens=CHUNK,
    head_groups=HEAD_GROUPS,
    section_layers=1,
)
#: Two shards, each a page of header and one for each of its sections.
CHUNK_BYTES = HEAD_GROUPS * (1 + SECTIONS) * 4096
NAMESPACES = tuple(Namespace("weights", LAYOUT, tenant_salt=salt) for salt in ("", "tenant"))
BLOCKS = 64
#: How long a load may outlive its deadline once no worker owes anything: two ticks.
GRACE_S = 0.25


@lru_cache(maxsize=1 << 16)
def tag_of(key: ChunkKey, block: int, head_group: int, section: int) -> bytes:
    """Return the KV of a chunk's ``block``-th block."""
    place = bytes((block, head_group, section))
    return hashlib.blake2b(key + place, digest_size=TAG_BYTES).digest()


def prompt(family: int, branch: int, chunks: int) -> list[int]:
    """Prompts of a family share three chunks, those of a branch all that both have."""
    shared = list(range(1000 * family, 1000 * family + 3 * CHUNK))
    own = range(1000 * family + 100 * (branch + 1), 1000 * family + 100 * (branch + 1) + 8 * CHUNK)
    return (shared + list(own))[: chunks * CHUNK]


@dataclass(eq=False)
class Request:
    """One request's life: looked up, loaded, computed, stored."""

    number: int
    sequence: Sequence
    start_token: int
    blocks: Blocks
    load: Load | None = None
    deadline: float = 0.0
    store: int | None = None
    plans: set[int] = field(default_factory=set)
    stale: bool = False
    matched: bool = False
    over: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.sequence.chunk_keys) * CHUNK


@dataclass(eq=False)
class WorldWorker:
    """One rank: what it was given and has not done, what it has done and not told."""

    placement: Placement
    memory: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    inbox: deque[Plan] = field(default_factory=deque)
    outbox: deque[Result] = field(default_factory=deque)

    def move(self, plan: Plan, arena: memoryview) -> None:
        """Do a plan's moves of this rank."""
        for move in plan.moves:
            if move.worker == self.placement.worker:
                for place, start in _places(move):
                    slot = arena[start : start + TAG_BYTES]
                    if plan.direction is Direction.LOAD:
                        self.memory[place] = bytes(slot)
                    else:
                        slot[:] = self.memory[place]


def _places(move: Move) -> Iterable[tuple[tuple[int, int, int], int]]:
    """Yield each block, head group and section of a move with where its tag lies in the arena."""
    first = move.token_start // BLOCK
    for section in range(move.first_section, move.first_section + move.section_count):
        start = move.slot.offset + move.payload_offset + section * SECTION_STRIDE
        for index, block in enumerate(move.block_ids):
            place = (block, move.shard.head_group, section)
            yield place, start + (first + index) * TAG_BYTES


class World:
    """One process: a cache, an engine's requests and their workers. Steps are its methods."""

    def __init__(
        self, cache: Cache, clock: Clock, draws: random.Random, placements: tuple[Placement, ...]
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.draws = draws
        self.workers = [WorldWorker(placement) for placement in placements]
        self.requests: list[Request] = []
        self.free = list(range(BLOCKS))
        self.owner: dict[int, Request] = {}  # By plan.
        self.hits: Counter[Tier] = Counter()
        self.seen: Counter[str] = Counter()
        #: Whether a rank fails at its next plan.
        self.fails: Callable[[], bool] = lambda: self.draws.random() < 0.02
        #: Whether a load is weighed against computing, and how long it may take.
        self.weighs: Callable[[], bool] = lambda: self.draws.random() < 0.3
        self.patience_s: Callable[[], float] = lambda: self.draws.choice((0.05, 0.5, 2.0))
        self._numbers = 0

    # What the engine does.

    def arrive(self, namespace: Namespace, tokens: list[int], start_token: int) -> None:
        """Take a request on; its first tokens are in HBM already."""
        count = (len(tokens) - start_token) // BLOCK
        if len(self.free) < count:
            return
        sequence = self.cache.sequence(namespace)
        sequence.append(tokens)
        ids = tuple(self.free.pop() for _ in range(count))
        blocks = Blocks(start_token, (ids,), BLOCK)
        self._numbers += 1
        self.requests.append(Request(self._numbers, sequence, start_token, blocks))

    def poll(self, request: Request) -> None:
        """Move one request on."""
        if request.store is not None:
            self._end_store(request)
        elif request.load is not None:
            self._poll_load(request)
        elif not request.matched:
            self._match(request)

    def cancel(self, request: Request) -> None:
        if request.load is not None:
            request.load.cancel()
            self.seen["cancelled"] += 1

    def work(self, worker: WorldWorker) -> None:
        """One rank does its next plan, or fails to."""
        if not worker.inbox:
            return
        plan = worker.inbox.popleft()
        request = self.owner[plan.plan_id]
        number = worker.placement.worker
        if self.clock.now() >= plan.deadline:
            result = Result(plan.plan_id, number, ok=False, reason=MissReason.DEADLINE)
        elif self.fails():
            result = Result(plan.plan_id, number, ok=False, reason=MissReason.WORKER)
            self.seen["worker failed"] += 1
        else:
            self.check_owned(plan, request)
            worker.move(plan, self.cache.arena)
            result = Result(plan.plan_id, number, ok=True)
        worker.outbox.append(result)

    def answer(self, worker: WorldWorker) -> None:
        """The engine hears of some of what a rank has done."""
        count = self.draws.randint(0, len(worker.outbox))
        self.cache.finish([worker.outbox.popleft() for _ in range(count)])

    def kill(self, worker: WorldWorker) -> None:
        """A rank dies with what it has; another takes its place."""
        worker.inbox.clear()
        worker.outbox.clear()
        self.cache.lose_worker(worker.placement.worker)
        self.seen["worker died"] += 1

    def execute(self, request: Request, plan: Plan) -> None:
        self.owner[plan.plan_id] = request
        request.plans.add(plan.plan_id)
        for worker in self.workers:
            if worker.placement.worker in plan.workers:
                worker.inbox.append(plan)

    # What must hold.

    def check_owned(self, plan: Plan, request: Request) -> None:
        """A plan that is still executed has blocks that are still its request's."""
        assert not request.over, "a plan of a request that is over"
        if plan.direction is Direction.LOAD:
            load = request.load
            assert load is not None, "its request has let the load go"
            assert load.outcome is None, "a late write into blocks that have another owner"

    def check_tags(self, request: Request, tokens: range) -> None:
        """Raise ``AssertionError`` unless the request's blocks hold the KV of these tokens."""
        for token in range(tokens.start, tokens.stop, BLOCK):
            key = request.sequence.chunk_keys[token // CHUNK]
            block = request.blocks.block_ids[0][(token - request.start_token) // BLOCK]
            for worker in self.workers:
                for head_group in self._head_groups(worker):
                    for section in range(SECTIONS):
                        right = tag_of(key, token % CHUNK // BLOCK, head_group, section)
                        found = worker.memory.get((block, head_group, section))
                        assert found == right, f"token {token} is wrong in section {section}"

    def check_deadlines(self) -> None:
        """A load is over soon after its deadline, once no worker owes anything."""
        now = self.clock.now()
        for request in self.requests:
            load = request.load
            if load is None or load.outcome is not None or now < request.deadline + GRACE_S:
                continue
            owed = [plan for plan in request.plans if not self.cache.store_done(plan)]
            assert owed, f"a load is {now - request.deadline} s late and nobody owes anything"

    def check_quiet(self) -> None:
        """Nothing is left over once everything has ended."""
        stats = self.cache.stats()
        assert stats.loads_inflight == stats.stores_inflight == stats.late_jobs == 0, stats
        pinned = {tier.tier: tier.pinned_chunks for tier in stats.tiers}
        assert not any(pinned.values()), f"pins are left: {pinned}"
        left = [plan for plan in self.owner if not self.cache.store_done(plan)]
        assert not left, f"plans are open that nobody owes: {left}"
        assert len(self.free) == BLOCKS, "blocks are lost"
        for tier in stats.tiers:
            told = self.hits[tier.tier]
            counted = tier.counters.hit_tokens
            assert told == counted, f"{tier.tier}: {counted} tokens counted, {told} told"
        self.cache.check_integrity()

    def _match(self, request: Request) -> None:
        match = self.cache.match(request.sequence)
        if isinstance(match, Pending):
            self.seen["pending"] += 1
            assert match.until > self.clock.now(), "an answer that should have been given"
            return
        request.matched = True
        self.cache.note_admission(match, request.start_token, request.tokens)
        self._begin_load(request, match)
        if request.load is None:
            self._compute(request, request.start_token)

    def _begin_load(self, request: Request, match: Ready) -> None:
        if match.tokens <= request.start_token:
            return
        choice = None
        if self.weighs():
            choice = self.cache.costs.choose(match, request.start_token, match.tokens)
        request.deadline = self.clock.now() + self.patience_s()
        request.load = self.cache.begin_load(
            match, request.blocks, deadline=request.deadline, choice=choice
        )

    def _poll_load(self, request: Request) -> None:
        load = request.load
        assert load is not None, "a request without a load"
        for plan in load.poll():
            self.execute(request, plan)
        if load.outcome is not None:
            self._take(request, load.outcome)

    def _take(self, request: Request, outcome: LoadOutcome) -> None:
        start, end = outcome.start_token, outcome.end_token
        assert start == request.start_token <= end <= request.tokens, outcome
        assert sum(outcome.tokens_by_tier.values()) == end - start, outcome
        assert end % BLOCK == 0, "part of a block"
        assert not (request.stale and end > start), "KV of an epoch that is over"
        self.check_tags(request, range(start, end))
        self.hits.update(outcome.tokens_by_tier)
        for tier in outcome.tokens_by_tier:
            self.seen[f"loaded from {tier}"] += 1
        for miss in outcome.misses:
            self.seen[f"missed: {miss.reason}"] += 1
        self._compute(request, end)

    def _compute(self, request: Request, end: int) -> None:
        """Compute what was not loaded, then store what is new, or be done."""
        request.load = None
        for token in range(end, request.tokens, BLOCK):
            key = request.sequence.chunk_keys[token // CHUNK]
            block = request.blocks.block_ids[0][(token - request.start_token) // BLOCK]
            for worker in self.workers:
                for head_group in self._head_groups(worker):
                    for section in range(SECTIONS):
                        tag = tag_of(key, token % CHUNK // BLOCK, head_group, section)
                        worker.memory[block, head_group, section] = tag
        self.cache.costs.note_prefill(end, max(request.tokens - end, 1), 0.01)
        first = -(-request.start_token // CHUNK)
        chunks = range(first, request.tokens // CHUNK)
        plan = None
        if chunks:
            blocks = self._blocks_from(request, first * CHUNK)
            plan = self.cache.begin_store(request.sequence, chunks, blocks)
        if plan is None:
            self._finish(request)
        else:
            request.store = plan.plan_id
            self.execute(request, plan)

    def _blocks_from(self, request: Request, token: int) -> Blocks:
        skipped = (token - request.start_token) // BLOCK
        return Blocks(token, (request.blocks.block_ids[0][skipped:],), BLOCK)

    def _end_store(self, request: Request) -> None:
        assert request.store is not None, "no store"
        if self.cache.store_done(request.store):
            self.seen["stored"] += 1
            self._finish(request)

    def _finish(self, request: Request) -> None:
        request.over = True
        self.requests.remove(request)
        self.free += request.blocks.block_ids[0]
        self.draws.shuffle(self.free)
        for plan in request.plans:
            if self.cache.store_done(plan):
                del self.owner[plan]
        self.seen["served"] += 1

    def _head_groups(self, worker: WorldWorker) -> range:
        size = worker.placement.tp_size
        share = HEAD_GROUPS // size
        return range(worker.placement.tp_rank * share, (worker.placement.tp_rank + 1) * share)
