"""Counting by tier and by tenant: once each, bounded, and without the salt."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import TENANTS_COUNTED_MAX
from kvtier.obs.counters import NO_TENANT, OTHER_TENANTS, Counters, tenant_name
from kvtier.obs.stats import LATENCY_BOUNDS_S, Histogram
from kvtier.types import MissReason, Tier

TIERS = (Tier.DRAM, Tier.DISK)
NOTES = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from(TIERS),
        st.sampled_from([None, MissReason.ABSENT, MissReason.CORRUPT]),
        st.integers(0, 1000),
    )
)


def noted(notes: list[tuple[str, Tier, MissReason | None, int]]) -> Counters:
    counters = Counters(TIERS)
    for salt, tier, reason, tokens in notes:
        if reason is None:
            counters.note_hit(salt, tier, tokens)
        else:
            counters.note_miss(salt, tier, reason, tokens)
    return counters


@given(NOTES)
def test_tenants_add_up_to_the_tiers(
    notes: list[tuple[str, Tier, MissReason | None, int]],
) -> None:
    counters = noted(notes)
    tenants = counters.tenants().values()
    for tier in TIERS:
        assert counters[tier].hit_tokens == sum(each.hit_tokens[tier] for each in tenants)
        for reason in MissReason:
            told = sum(each.miss_tokens[tier, reason] for each in tenants)
            assert counters[tier].miss_tokens[reason] == told


def test_a_tenant_has_its_own_figures() -> None:
    counters = noted(
        [
            ("a", Tier.DISK, None, 8),
            ("a", Tier.DRAM, MissReason.ABSENT, 8),
            ("", Tier.DRAM, None, 4),
        ]
    )
    tenants = counters.tenants()
    assert set(tenants) == {tenant_name("a"), NO_TENANT}
    assert tenants[tenant_name("a")].hit_tokens == Counter({Tier.DISK: 8})
    assert tenants[tenant_name("a")].miss_tokens == Counter({(Tier.DRAM, MissReason.ABSENT): 8})


def test_a_name_tells_no_salt() -> None:
    name = tenant_name("sesame")
    assert "sesame" not in name
    assert len(name) == 12
    assert int(name, 16) >= 0
    assert len({tenant_name(salt) for salt in ("a", "b", "c", NO_TENANT, OTHER_TENANTS)}) == 5


def test_so_many_tenants_are_told_apart_and_no_more() -> None:
    counters = Counters(TIERS)
    for number in range(TENANTS_COUNTED_MAX + 10):
        counters.note_hit(f"tenant {number}", Tier.DRAM, 1)
    counters.note_hit("tenant 0", Tier.DRAM, 1)
    tenants = counters.tenants()
    assert len(tenants) == TENANTS_COUNTED_MAX + 1
    assert tenants[OTHER_TENANTS].hit_tokens[Tier.DRAM] == 10
    assert tenants[tenant_name("tenant 0")].hit_tokens[Tier.DRAM] == 2


def test_a_snapshot_stays_as_it_was() -> None:
    counters = noted([("a", Tier.DRAM, None, 1)])
    before = counters.tenants()
    counters.note_hit("a", Tier.DRAM, 1)
    assert before[tenant_name("a")].hit_tokens[Tier.DRAM] == 1


def test_quantiles_lie_within_their_buckets() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) is None
    for seconds in (0.02, 0.02, 0.02, 0.4):
        histogram.observe(seconds)
    assert histogram.count == 4
    median = histogram.quantile(0.5)
    assert median is not None
    assert 0.01 < median <= 0.025
    slow = histogram.quantile(0.99)
    assert slow is not None
    assert 0.25 < slow <= 0.5


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_finite_and_grows_with_its_share(seconds: list[float], share: float) -> None:
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    found, more = histogram.quantile(share), histogram.quantile(1.0)
    assert found is not None
    assert more is not None
    assert 0 <= found <= more <= LATENCY_BOUNDS_S[-1]
