"""Which chunks of a vLLM request are offered, and when what was left out is offered again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.testing.clock import FakeClock
from kvtier.types import Blocks, Direction, MissReason, Move, Namespace, Plan
from kvtier_adapters.vllm.guard import Guard
from kvtier_adapters.vllm.requests import Followed
from kvtier_adapters.vllm.stores import StoreDesk
from tests.lib.cache_setup import LAYOUT

BLOCK = LAYOUT.chunk_tokens // 2
CHUNKS = 3


class OneEach:
    """Takes one chunk of each offer, and says why it takes no more."""

    def __init__(self, refused: MissReason) -> None:
        self._refused = refused
        self.offered: list[range] = []

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan:
        self.offered.append(chunks)
        sequence.refused = self._refused if len(chunks) > 1 else None
        move = cast(Move, SimpleNamespace(block_ids=blocks.block_ids[0][:2]))
        return Plan(len(self.offered), Direction.STORE, 1.0, (move,))


@pytest.mark.parametrize(
    ("refused", "starts"), [(MissReason.CROWDED, [0, 1, 2]), (MissReason.NO_ROOM, [0])]
)
def test_what_waits_for_a_staging_area_is_offered_with_each_step(
    refused: MissReason, starts: list[int]
) -> None:
    """No step waits for it, and it waits for no chunk more."""
    tokens = CHUNKS * LAYOUT.chunk_tokens
    request: Any = SimpleNamespace(
        request_id="one",
        num_computed_tokens=tokens,
        num_tokens=tokens,
        all_token_ids=range(tokens),
        block_hashes=[],
    )
    followed = Followed(request, Sequence(Namespace("model", LAYOUT), bytes(32)), settled=tokens)
    cache = OneEach(refused)
    desk = StoreDesk(cast(Any, cache), Guard(FakeClock()), BLOCK)
    pool = SimpleNamespace(blocks=range(100), touch=lambda _: None, free_blocks=lambda _: None)
    desk.held.bind(pool)
    for _ in range(5):
        desk.offer(followed, [list(range(2 * CHUNKS))])
    assert [chunks.start for chunks in cache.offered] == starts
