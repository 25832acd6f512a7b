"""What of a match is loaded, by numbers alone."""

from __future__ import annotations

import pytest

from kvtier.cache.worth.cost import (
    LEAVES_AT,
    RETURNS_AT,
    Judged,
    Price,
    Reason,
    Segment,
    judge,
    segments,
    split_at,
)
from kvtier.types import ChunkHit, ChunkKey, Tier

CHUNK = 256


def per_token(start_token: int, end_token: int) -> float:
    """A millisecond a token."""
    return (end_token - start_token) / 1000


def unknown(start_token: int, end_token: int) -> float | None:
    del start_token, end_token
    return None


def run_of(start: int, end: int, tier: Tier = Tier.DISK) -> Segment:
    return Segment(start, end, tier, "raw", end - start, 8)


def reasons(judged: list[Judged]) -> list[Reason]:
    return [each.reason for each in judged]


def test_hits_are_cut_where_tier_or_codec_changes() -> None:
    kinds = [(Tier.DRAM, "raw")] * 2 + [(Tier.DISK, "raw"), (Tier.DISK, "fp8"), (Tier.DRAM, "fp8")]
    hits = [ChunkHit(ChunkKey(bytes([i]) * 32), *kind) for i, kind in enumerate(kinds)]
    runs = segments(hits, range(100, 1200), CHUNK, lambda chunk, codec: (10 + chunk, len(codec)))
    assert runs == [
        Segment(100, 512, Tier.DRAM, "raw", 21, 6),
        Segment(512, 768, Tier.DISK, "raw", 12, 3),
        Segment(768, 1024, Tier.DISK, "fp8", 13, 3),
        Segment(1024, 1200, Tier.DRAM, "fp8", 14, 3),
    ]
    assert segments(hits, range(1280, 1280), CHUNK, lambda _chunk, _codec: (1, 1)) == []


@pytest.mark.parametrize(
    ("load_s", "left_before", "reason"),
    [
        (0.5, False, Reason.FASTER),
        (LEAVES_AT - 0.01, False, Reason.FASTER),
        (LEAVES_AT + 0.01, False, Reason.RETRY),
        (RETURNS_AT + 0.01, True, Reason.RETRY),
        (RETURNS_AT - 0.01, True, Reason.FASTER),
        (None, False, Reason.UNKNOWN),
    ],
)
def test_a_run_is_loaded_if_that_is_faster(
    load_s: float | None, left_before: bool, reason: Reason
) -> None:
    price = Price(load_s, left_before=left_before)
    assert reasons(judge([run_of(0, 1000)], [price], per_token)) == [reason]


def test_what_computing_costs_is_unknown_so_everything_is_loaded() -> None:
    judged = judge([run_of(0, 1000)], [Price(99.0)], unknown)
    assert reasons(judged) == [Reason.UNKNOWN]
    assert judged[0].recompute_s is None


def test_the_best_cut_may_be_at_a_boundary() -> None:
    runs = [run_of(0, 1000, Tier.DRAM), run_of(1000, 2000), run_of(2000, 3000, Tier.REMOTE)]
    prices = [Price(0.01), Price(0.4), Price(5.0, idle=False)]
    judged = judge(runs, prices, per_token)
    assert reasons(judged) == [Reason.FASTER, Reason.FASTER, Reason.SLOWER]
    assert [each.loaded for each in judged] == [True, True, False]


def test_a_slow_run_is_worth_it_for_the_fast_ones_behind_it() -> None:
    runs = [run_of(0, 1000), run_of(1000, 9000, Tier.DRAM)]
    judged = judge(runs, [Price(2.0), Price(0.1)], per_token)
    assert reasons(judged) == [Reason.FASTER, Reason.FASTER]


def test_nothing_is_loaded_behind_what_is_not() -> None:
    runs = [run_of(0, 1000), run_of(1000, 2000, Tier.DRAM)]
    judged = judge(runs, [Price(0.1, silent=True), Price(0.01)], per_token)
    assert reasons(judged) == [Reason.SILENT, Reason.SLOWER]


def test_a_slow_link_is_tried_once_at_a_time() -> None:
    slow = run_of(0, 1000)
    assert reasons(judge([slow], [Price(9.0)], per_token)) == [Reason.RETRY]
    assert reasons(judge([slow], [Price(9.0, idle=False)], per_token)) == [Reason.SLOWER]


def test_a_try_holds_up_nothing_that_is_worth_it() -> None:
    runs = [run_of(0, 1000), run_of(1000, 2000, Tier.REMOTE)]
    judged = judge(runs, [Price(0.1), Price(9.0)], per_token)
    assert reasons(judged) == [Reason.FASTER, Reason.SLOWER]
    both = judge([run_of(0, 1000), run_of(1000, 2000)], [Price(9.0), Price(9.0)], per_token)
    assert reasons(both) == [Reason.RETRY, Reason.RETRY], "one link, one try"


def test_no_run_no_verdict() -> None:
    assert judge([], [], per_token) == []


def whole(load_s: float | None, tier: Tier = Tier.DISK) -> list[Judged]:
    return judge([run_of(0, 1024, tier)], [Price(load_s)], per_token)


@pytest.mark.parametrize(
    ("load_s", "cut"), [(1.024, 512), (0.512, 256), (0.34, 256), (0.26, None), (0.01, None)]
)
def test_computing_the_front_takes_as_long_as_loading_the_back(
    load_s: float, cut: int | None
) -> None:
    assert split_at(whole(load_s), CHUNK, per_token) == cut


@pytest.mark.parametrize(("move_s", "cut"), [(0.0, 512), (0.2, 512), (0.7, 256), (0.8, None)])
def test_what_the_device_unpacks_takes_its_time(move_s: float, cut: int | None) -> None:
    judged = judge([run_of(0, 1024)], [Price(1.024, move_s)], per_token)
    assert split_at(judged, CHUNK, per_token) == cut


def test_only_one_run_below_dram_that_is_worth_it_is_split() -> None:
    assert split_at(whole(1.0, Tier.DRAM), CHUNK, per_token) is None
    assert split_at(whole(None), CHUNK, per_token) is None
    assert split_at(whole(9.0), CHUNK, per_token) is None
    runs = [run_of(0, 1024), run_of(1024, 2048, Tier.REMOTE)]
    two = judge(runs, [Price(0.9), Price(0.9)], per_token)
    assert split_at(two, CHUNK, per_token) is None
    assert split_at([], CHUNK, per_token) is None


def test_a_split_is_at_a_chunk_wherever_the_run_begins() -> None:
    judged = judge([run_of(100, 1024)], [Price(0.9)], per_token)
    cut = split_at(judged, CHUNK, per_token)
    assert cut == 512
