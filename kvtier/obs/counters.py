"""Counting what the tiers gave and did not give: per tier, and per tenant and tier.

Each token is counted once in a tier's figures and once in its tenant's, by the same call, so that
the two always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from kvtier.constants import TENANTS_COUNTED_MAX
from kvtier.keys import tenant_digest
from kvtier.obs.stats import TenantCounters, TierCounters
from kvtier.types import LoadOutcome, MissReason, Tier

#: Requests without a salt, and those of tenants beyond the bound.
NO_TENANT: Final = "none"
OTHER_TENANTS: Final = "other"
_DIGEST_HEX: Final = 12


@lru_cache(maxsize=1024)
def tenant_name(salt: str) -> str:
    """Return what stands for a tenant in figures: the start of its digest, never the salt."""
    return tenant_digest(salt).hex()[:_DIGEST_HEX] if salt else NO_TENANT


class Counters(dict[Tier, TierCounters]):
    """The counters of every tier, by tier. Owned by the cache, used under its lock.

    At most ``TENANTS_COUNTED_MAX`` tenants are told apart, the first to come; all others are
    counted together.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        super().__init__((tier, TierCounters()) for tier in tiers)
        self._tenants: dict[str, TenantCounters] = {}

    def note_hit(self, salt: str, tier: Tier, tokens: int) -> None:
        """Count tokens that a tier gave to a tenant."""
        self[tier].hit_tokens += tokens
        self._tenant(salt).hit_tokens[tier] += tokens

    def note_miss(self, salt: str, tier: Tier, reason: MissReason, tokens: int) -> None:
        """Count tokens that a tenant asked a tier for in vain."""
        self[tier].miss_tokens[reason] += tokens
        self._tenant(salt).miss_tokens[tier, reason] += tokens

    def note_load(self, salt: str, outcome: LoadOutcome) -> None:
        """Count what a tenant's load has brought and what not."""
        for tier, tokens in outcome.tokens_by_tier.items():
            self.note_hit(salt, tier, tokens)
        for miss in outcome.misses:
            self.note_miss(salt, miss.tier, miss.reason, miss.tokens)

    def tenants(self) -> Mapping[str, TenantCounters]:
        """Return a snapshot, by ``tenant_name``."""
        return {name: counters.copy() for name, counters in self._tenants.items()}

    def _tenant(self, salt: str) -> TenantCounters:
        name = tenant_name(salt)
        counters = self._tenants.get(name)
        if counters is None:
            if len(self._tenants) >= TENANTS_COUNTED_MAX:
                name = OTHER_TENANTS
            counters = self._tenants.setdefault(name, TenantCounters())
        return counters
