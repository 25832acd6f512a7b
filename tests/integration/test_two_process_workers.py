"""Two ranks in two processes of their own, one cache: plans and results are all that travels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.config import CacheConfig, DiskConfig
from kvtier.testing.engine_double import wait_until
from kvtier.testing.rank_process import RankProcess
from kvtier.tiers.memory import map_arena
from kvtier.types import (
    Blocks,
    LoadOutcome,
    Miss,
    MissReason,
    Namespace,
    Placement,
    Plan,
    Result,
    Tier,
)
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    SPLIT,
    ErrorLog,
    idle,
    ranks,
    tier_stats,
)

RANKS = ranks(2)
THREE = range(3 * CHUNK)
SPARE_BLOCKS = 30


class Deployment:
    """A scheduler with a shared cache, and a process for each rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.namespace = Namespace("weights", SPLIT)
        self.cache = self._open()
        self.ranks = [self.start_rank(place) for place in RANKS]

    def _open(self) -> Cache:
        config = CacheConfig(
            dram_bytes=16 * CHUNK_BYTES,
            disk=DiskConfig(str(self._folder / "disk"), 64 * CHUNK_BYTES),
            slab_bytes=4096,
            workers=RANKS,
            shared=True,
        )
        return Cache(config)

    def start_rank(self, place: Placement) -> RankProcess:
        handle = self.cache.arena_handle
        return RankProcess(SPLIT, place, handle, block_tokens=BLOCK, block_count=SPARE_BLOCKS)

    def sequence(self, tokens: range = THREE) -> Sequence:
        sequence = self.cache.sequence(self.namespace)
        sequence.append(list(tokens))
        return sequence

    def match(self, sequence: Sequence) -> Ready:
        found: list[Ready] = []

        def ready() -> bool:
            match = self.cache.match(sequence)
            if not isinstance(match, Pending):
                found.append(match)
            return bool(found)

        wait_until(ready, "the disk does not open")
        return found[0]

    def blocks(self, tokens: range, first: int = 0) -> Blocks:
        """The pool's blocks from the last one down, so that ids and tokens run apart."""
        ids = range(SPARE_BLOCKS - 1 - first, SPARE_BLOCKS - 1 - first - len(tokens) // BLOCK, -1)
        return Blocks(tokens.start, (tuple(ids),), BLOCK)

    def finish(self) -> None:
        for rank in self.ranks:
            self.cache.finish(rank.poll())

    def execute(self, plan: Plan) -> None:
        for rank in self.ranks:
            rank.execute(plan)

    def store(self, sequence: Sequence) -> None:
        chunks = range(len(sequence.chunk_keys))
        blocks = self.blocks(range(len(chunks) * CHUNK))
        for rank in self.ranks:
            rank.write(sequence.chunk_keys, blocks)
        plan = self.cache.begin_store(sequence, chunks, blocks)
        assert plan is not None
        self.execute(plan)

        def done() -> bool:
            self.finish()
            return self.cache.store_done(plan.plan_id)

        wait_until(done, "a store is not answered")

    def begin(self, sequence: Sequence, tokens: range) -> tuple[Load, Blocks]:
        for rank in self.ranks:
            rank.poison()
        blocks = self.blocks(tokens, first=7)
        load = self.cache.begin_load(self.match(sequence), blocks)
        assert load is not None
        return load, blocks

    def drive(self, load: Load) -> LoadOutcome:
        def over() -> bool:
            for plan in load.poll():
                self.execute(plan)
            self.finish()
            return load.outcome is not None

        wait_until(over, "a load does not end")
        assert load.outcome is not None
        return load.outcome

    def load(self, sequence: Sequence, tokens: range = THREE) -> LoadOutcome:
        """Load and let each rank look at its own half of the heads."""
        load, blocks = self.begin(sequence, tokens)
        outcome = self.drive(load)
        for rank in self.ranks:
            valid = range(outcome.start_token, outcome.end_token)
            rank.check(sequence.chunk_keys, blocks, valid)
        return outcome

    def settle(self) -> None:
        wait_until(lambda: idle(self.cache.stats()), "not idle")
        self.cache.check_integrity()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.settle()
        self.cache.close()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    errors: list[logging.LogRecord] = []
    log = ErrorLog(errors)
    logging.getLogger("kvtier").addHandler(log)
    deployment = Deployment(tmp_path_factory.mktemp("deployment"))
    yield deployment
    deployment.close()
    logging.getLogger("kvtier").removeHandler(log)
    assert not errors, [record.getMessage() for record in errors]


def test_two_ranks_store_and_load_their_halves(deployment: Deployment) -> None:
    sequence = deployment.sequence()
    deployment.store(sequence)
    assert deployment.load(sequence).tokens_by_tier == {Tier.DRAM: 24}
    assert deployment.load(sequence, range(4, 20)).end_token == 20

    # The next requests push it out of DRAM; it comes back from disk.
    wait_until(lambda: deployment.cache.stats().writes_queued == 0, "writes do not end")
    for start in range(100, 700, 100):
        deployment.store(deployment.sequence(range(start, start + 3 * CHUNK)))
        wait_until(lambda: deployment.cache.stats().writes_queued == 0, "writes do not end")
    assert {hit.tier for hit in deployment.match(sequence).hits} == {Tier.DISK}
    assert deployment.load(sequence).tokens_by_tier == {Tier.DISK: 24}


def test_b45_a_rank_that_fails_and_one_that_dies(deployment: Deployment) -> None:
    sequence = deployment.sequence(range(1000, 1000 + 3 * CHUNK))
    deployment.store(sequence)

    # Rank 1 answers that it could not.
    load, _ = deployment.begin(sequence, THREE)
    (plan,) = load.poll()
    deployment.ranks[0].execute(plan)
    deployment.cache.finish([Result(plan.plan_id, 1, ok=False, reason=MissReason.WORKER)])
    outcome = deployment.drive(load)
    assert (outcome.end_token, outcome.misses) == (
        0,
        (Miss(Tier.DRAM, MissReason.WORKER, 24),),
    )
    deployment.settle()
    assert deployment.load(sequence).end_token == 24

    # Rank 1 is killed between two sections.
    deployment.ranks[1].stall()
    load, _ = deployment.begin(sequence, THREE)
    (plan,) = load.poll()
    deployment.execute(plan)
    deployment.ranks[1].wait_for_stall()
    rank = deployment.ranks.pop()
    rank.kill()
    wait_until(lambda: bool(answered(deployment)), "rank 0 does not answer")
    assert not is_over(load), "a rank still owes its answer"
    assert tier_stats(deployment.cache, Tier.DRAM).pinned_chunks == 3
    deployment.cache.lose_worker(1)
    assert is_over(load)
    assert deployment.drive(load).misses == (Miss(Tier.DRAM, MissReason.WORKER, 24),)
    deployment.settle()

    # Another process takes its place.
    deployment.ranks.append(deployment.start_rank(rank.placement))
    assert deployment.load(sequence).end_token == 24
    longer = deployment.sequence(range(2000, 2000 + 3 * CHUNK))
    deployment.store(longer)
    assert deployment.load(longer).end_token == 24


def is_over(load: Load) -> bool:
    return load.outcome is not None


def answered(deployment: Deployment) -> list[Result]:
    """Carry rank 0's answers to the cache and return them."""
    results = deployment.ranks[0].poll()
    deployment.cache.finish(results)
    return results


def test_an_arena_whose_owner_is_gone_cannot_be_mapped() -> None:
    cache = Cache(CacheConfig(dram_bytes=8 * 4096, slab_bytes=4096, shared=True))
    handle = cache.arena_handle
    view = map_arena(handle)
    view[0] = 7
    assert cache.arena[0] == 7
    cache.close()
    assert view[0] == 7, "a mapping outlives its owner"
    with pytest.raises(OSError, match="fd"):
        map_arena(handle)
