"""Whose miss it is when a load does not bring everything."""

from __future__ import annotations

import pytest

from kvtier.cache.pieces import Piece, missed
from kvtier.types import ChunkKey, Miss, MissReason, Tier

KEY = ChunkKey(bytes(32))
DRAM, DISK, REMOTE = Tier.DRAM, Tier.DISK, Tier.REMOTE


@pytest.mark.parametrize(
    ("tiers", "failed", "blamed"),
    [
        ([DRAM, DISK, DISK], DRAM, {DRAM: 8, DISK: 16}),
        ([DISK, DRAM, DISK], DISK, {DISK: 24}),
        ([DISK, DRAM, REMOTE], DISK, {DISK: 16, REMOTE: 8}),
        ([REMOTE, DISK, DRAM], REMOTE, {REMOTE: 24}),
    ],
)
def test_no_tier_is_blamed_for_what_the_lookup_has_counted_against_it(
    tiers: list[Tier], failed: Tier, blamed: dict[Tier, int]
) -> None:
    """A lookup counts a chunk against every tier that is faster than the one that has it."""
    lost = [Piece(i, KEY, range(8), frozenset(), tier) for i, tier in enumerate(tiers)]
    misses = missed(lost, failed, MissReason.CANCELLED)
    assert misses == tuple(Miss(tier, MissReason.CANCELLED, n) for tier, n in blamed.items())
