"""What a cache counts: plain numbers, snapshot into frozen values, exported by whoever embeds it.

Counters never decrease. The owner of a ``TierCounters`` is the cache, under its lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvtier.types import MissReason, Tier

#: Upper bounds of the latency buckets, seconds; one more bucket holds what is slower.
LATENCY_BOUNDS_S: tuple[float, ...] = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


@dataclass(slots=True)
class Histogram:
    """Counts of observations by ``LATENCY_BOUNDS_S``, with their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the seconds that a share of the observations took at most, about.

        Within a bucket they are taken to lie evenly, and at its lower bound in the last one, which
        has no other. None before the first.
        """
        wanted = share * self.count
        if not wanted:
            return None
        below, bounds = 0, (0.0, *LATENCY_BOUNDS_S)
        for bucket, count in enumerate(self.counts[:-1]):
            if below + count >= wanted:
                start, end = bounds[bucket], bounds[bucket + 1]
                return start + (end - start) * (wanted - below) / count
            below += count
        return LATENCY_BOUNDS_S[-1]

    def copy(self) -> Histogram:
        """Return a snapshot that later observations do not change."""
        return Histogram(list(self.counts), self.total_s)


@dataclass(slots=True)
class TierCounters:
    """Running counts of one tier."""

    hit_tokens: int = 0
    miss_tokens: Counter[MissReason] = field(default_factory=Counter)
    read_bytes: int = 0
    lent_bytes: int = 0  # Of the bytes read, those that were used where they lay, without a copy.
    written_bytes: int = 0
    read_latency: Histogram = field(default_factory=Histogram)
    write_latency: Histogram = field(default_factory=Histogram)
    corrupt_shards: int = 0
    evicted_chunks: int = 0
    refused_chunks: Counter[MissReason] = field(default_factory=Counter)
    io_errors: int = 0

    def copy(self) -> TierCounters:
        """Return a snapshot that later counting does not change."""
        return replace(
            self,
            miss_tokens=self.miss_tokens.copy(),
            refused_chunks=self.refused_chunks.copy(),
            read_latency=self.read_latency.copy(),
            write_latency=self.write_latency.copy(),
        )


@dataclass(slots=True)
class TenantCounters:
    """Running counts of one tenant, by tier."""

    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    miss_tokens: Counter[tuple[Tier, MissReason]] = field(default_factory=Counter)

    def copy(self) -> TenantCounters:
        """Return a snapshot that later counting does not change."""
        return TenantCounters(self.hit_tokens.copy(), self.miss_tokens.copy())


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier at one instant. ``state`` is ``ok`` or says what is wrong in one word.

    ``codec`` is what packs the chunks that are stored from now on.
    """

    tier: Tier
    state: str
    detail: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    pinned_chunks: int
    quarantined_files: int
    counters: TierCounters
    index_bytes: int = 0
    codec: str = ""

    @property
    def bounded(self) -> bool:
        """False: others bound what is held, and nobody here knows how much that is."""
        return self.capacity_bytes > 0

    @property
    def write_amplification(self) -> float:
        """Bytes written to the medium for each byte of chunks: the index at rest comes on top."""
        written = self.counters.written_bytes
        return (written + self.index_bytes) / written if written else 1.0


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """One remote at one instant. Of its URL the scheme alone: the rest may hold a password.

    ``state`` is ``ok`` or says what is wrong in one word.
    """

    number: int
    scheme: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What a tier's link is measured to do: seconds until it answers, then bytes a second."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CostStats:
    """What loading and computing are measured to cost, and how often was decided what.

    Computing n tokens behind c costs ``n * (per_token + per_token_squared * (c + n / 2))``.
    ``moves_bytes_per_s`` is from DRAM into the engine's pool, by codec. ``decisions`` counts runs
    of tokens by tier and reason.
    """

    links: Mapping[Tier, LinkStats] = field(default_factory=dict)
    moves_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    prefill_s_per_token: float | None = None
    prefill_s_per_token_squared: float | None = None
    decisions: Mapping[tuple[Tier, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A cache at one instant.

    ``tenants`` are named by a digest. ``saved_compute_s`` is how much longer computing would have
    taken than loading did, by estimate; ``lost_compute_s`` the same of loads that took longer.
    ``codec_fallbacks`` counts chunks that another codec packed, by the configured one and reason.
    """

    tiers: tuple[TierStats, ...]
    loads_inflight: int
    stores_inflight: int
    writes_queued: int
    late_jobs: int
    codec_fallbacks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    tenants: Mapping[str, TenantCounters] = field(default_factory=dict)
    saved_compute_s: float = 0.0
    lost_compute_s: float = 0.0
    costs: CostStats = field(default_factory=CostStats)
    events_dropped: int = 0
    remotes: tuple[RemoteStats, ...] = ()
    deletions_queued: int = 0

    @property
    def degraded(self) -> bool:
        """True while any tier is not ``ok``."""
        return any(tier.state != "ok" for tier in self.tiers)
