"""What is kept of sliding windows until it is stored, and what of them a load needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.types import Blocks, Namespace
from kvtier_adapters.vllm.loads import all_there, load_end, load_units
from kvtier_adapters.vllm.messages import LoadEnd
from kvtier_adapters.vllm.requests import Followed
from kvtier_adapters.vllm.windows import KeptBlocks
from tests.lib.vllm_double import double_geometry
from tests.lib.vllm_double_parts import DoublePool

BLOCK, CHUNK = 4, 8
LAYOUT = double_geometry(1, BLOCK, 40, windows=(0, 9)).layout(CHUNK)
FULL = double_geometry(1, BLOCK, 40).layout(CHUNK)


def follow(settled: int = 0) -> Followed:
    request: Any = SimpleNamespace(request_id="one", num_computed_tokens=settled)
    return Followed(request, Sequence(Namespace("model", LAYOUT), bytes(32)), settled=settled)


def counts(pool: DoublePool, table: list[int]) -> list[int]:
    return [pool.blocks[number].ref_cnt for number in table]


@pytest.fixture
def pool() -> DoublePool:
    return DoublePool(40)


def kept(pool: DoublePool, step_blocks: int = 4) -> KeptBlocks:
    blocks = KeptBlocks(BLOCK, step_blocks)
    blocks.bind(pool)
    return blocks


def taken(pool: DoublePool, count: int) -> list[int]:
    table = pool.allocate(count)
    assert table is not None
    return table


def test_blocks_of_windows_are_kept_until_their_chunk_was_offered(pool: DoublePool) -> None:
    full, window = taken(pool, 6), taken(pool, 5)
    keep, followed = kept(pool), follow(20)
    keep.begin(followed, (full, window))
    keep.keep(followed)
    keep.keep(followed)
    assert (counts(pool, full), counts(pool, window)) == ([1] * 6, [2] * 5)
    followed.tables[1] += (more := taken(pool, 2))
    keep.keep(followed)
    assert counts(pool, more) == [2, 2]
    keep.let_go(followed, 2)
    assert counts(pool, window + more) == [1] * 4 + [2] * 3
    keep.let_go(followed)
    assert counts(pool, window + more) == [1] * 7


def test_chunks_that_lack_a_block_are_not_stored(pool: DoublePool) -> None:
    followed, keep = follow(20), kept(pool)
    keep.begin(followed, (taken(pool, 6), [0, 0, 0, *taken(pool, 3)]))
    assert followed.lost_chunks == 2
    keep.keep(followed)
    assert counts(pool, followed.tables[1]) == [0, 0, 0, 1, 2, 2]


def test_a_step_that_may_lack_blocks_gets_what_is_kept(pool: DoublePool) -> None:
    followed, keep = follow(20), kept(pool, step_blocks=20)
    keep.begin(followed, (taken(pool, 6), window := taken(pool, 6)))
    keep.keep(followed)
    assert counts(pool, window) == [2] * 6
    taken(pool, 2)
    keep.keep(followed)
    assert counts(pool, window) == [1] * 6
    # Of 20 tokens the last eight are in the next one's window.
    assert followed.lost_chunks == 2


def test_requests_that_begin_again_have_nothing_kept(pool: DoublePool) -> None:
    followed, keep = follow(20), kept(pool)
    keep.begin(followed, (taken(pool, 6), window := taken(pool, 6)))
    keep.keep(followed)
    keep.let_preempted_go()
    assert counts(pool, window) == [2] * 6
    followed.request.num_computed_tokens = 0
    keep.let_preempted_go()
    assert counts(pool, window) == [1] * 6


def test_a_load_needs_the_blocks_of_the_last_window() -> None:
    full = tuple(range(1, 11))
    for nulls, there in ((8, True), (7, True), (9, False), (0, True)):
        blocks = Blocks(4, (full, (0,) * nulls + full[nulls:]), BLOCK)
        assert all_there(LAYOUT, blocks) == there
    assert not all_there(FULL, Blocks(4, ((1, 2, 0),), BLOCK))
    # Four to 44, of which the window has 36 to 44: of two layers in one section, two heads.
    assert load_units(LAYOUT, 1, range(4, 44), BLOCK) == (40 + 8) * 2


def test_vllm_is_told_of_windows_as_a_whole() -> None:
    assert load_end(7, "one", FULL, ((3, 4),)) == LoadEnd(7, "one", (3, 4))
    assert load_end(7, "one", LAYOUT, ((3, 4), (0, 5))) == LoadEnd(7, "one", failed=True)
    assert load_end(7, "one", LAYOUT, ((), ())) == LoadEnd(7, "one")
    window = double_geometry(1, BLOCK, 40, windows=(9,)).layout(CHUNK)
    assert load_end(7, "one", window, ((0, 5),)) == LoadEnd(7, "one", failed=True)
