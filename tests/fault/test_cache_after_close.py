"""A cache that is closed answers whatever it is asked, since another thread may not know yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cache.match import Ready
from kvtier.errors import TierUnavailableError
from kvtier.types import MissReason
from tests.lib.cache_setup import written
from tests.lib.remote_lab import RemoteLab, tokens_of


def test_a_closed_cache_with_a_remote_answers(tmp_path: Path) -> None:
    lab = RemoteLab(tmp_path)
    engine = lab.open()
    sequence = engine.sequence(tokens_of(2))
    engine.store(sequence)
    written(engine)
    match = engine.match(sequence)
    before = lab.remote.objects()

    lab.close(engine)

    cache = engine.cache
    assert cache.remove(sequence.chunk_keys) == [False, False]
    assert lab.remote.objects() == before
    assert cache.match(sequence) == Ready(sequence, ())
    assert not cache.prefetch(match)
    assert cache.begin_load(match, engine.blocks(tokens_of(2))) is None
    assert cache.begin_store(sequence, range(2), engine.blocks(tokens_of(2))) is None
    with pytest.raises(TierUnavailableError):  # No remote has been told of it.
        cache.invalidate(engine.namespace)
    assert cache.pins.pin(match, 1.0).reason is MissReason.UNAVAILABLE
    cache.lose_worker(0)
    cache.check_integrity()
