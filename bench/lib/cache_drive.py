"""A cache and its worker, driven by one thread from the order to the end: benches wait for it."""

from __future__ import annotations

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.testing.engine_double import wait_until
from kvtier.types import Blocks


def store(cache: Cache, worker: CacheWorker, sequence: Sequence, chunks: range, at: Blocks) -> None:
    """Store chunks and wait until they are written below, too."""
    plan = cache.begin_store(sequence, chunks, at)
    assert plan is not None, "nothing to store"
    worker.execute(plan)

    def done() -> bool:
        cache.finish(worker.poll())
        return cache.store_done(plan.plan_id) and not cache.stats().writes_queued

    wait_until(done, "the store")


def load(cache: Cache, worker: CacheWorker, sequence: Sequence, into: Blocks) -> int:
    """Load what matches and wait for it; return how many tokens came."""
    wait_until(lambda: isinstance(cache.match(sequence), Ready), "the lookup")
    match = cache.match(sequence)
    assert isinstance(match, Ready), "it was"
    load = cache.begin_load(match, into)
    assert load is not None, "no load"

    def done() -> bool:
        for plan in load.poll():
            worker.execute(plan)
        cache.finish(worker.poll())
        return load.outcome is not None

    wait_until(done, "the load")
    assert load.outcome is not None, "it was"
    return load.outcome.end_token
