"""The books of a remote that nobody else writes to keep the contract of tiers."""

from __future__ import annotations

from typing import Any

from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.tier_contract import OnEvict, TierBooks, TierContract
from kvtier.tiers.index import Record
from kvtier.tiers.remote.holdings import Holdings


class TestHoldings(TierContract):
    place_follows_key = True

    def make_tier(self, capacity_bytes: int, on_evict: OnEvict) -> TierBooks:
        return Holdings(capacity_bytes, LRU, FakeClock(), on_evict)

    def settle(self, tier: Any) -> None:
        tier.take_deletions()

    def leave(self, tier: Any, record: Record[Any]) -> None:
        tier.forget(record)
