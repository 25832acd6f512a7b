"""A cache's events in vLLM's words: each of them once, and no more than was told."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.cache.event_feed import EventFeed
from kvtier.obs.events import Cleared, Content, Event, Removed, Stored
from kvtier.types import ChunkKey, Namespace, Tier
from kvtier_adapters.vllm.events import BlocksCame, BlocksLeft, EventDesk
from kvtier_adapters.vllm.requests import Followed
from tests.lib.vllm_double import double_geometry

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(4)]
HASHES = [f"block {number}".encode() for number in range(8)]
NAMESPACE = Namespace("a double", double_geometry(1, 4, 8).layout(8))


class Feed:
    """Gives what a test has put in."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def take(self, count_max: int) -> list[Event]:
        taken, self.events = self.events[:count_max], self.events[count_max:]
        return taken


@pytest.fixture
def feed() -> Feed:
    return Feed()


def desk_of(feed: Feed, names_max: int = 100) -> EventDesk:
    return EventDesk(cast(EventFeed, feed), 4, names_max)


def followed(chunks: range, hashes: int = 8, lora: Any = None) -> Followed:
    """A request whose chunks have these keys and two blocks each."""
    sequence = SimpleNamespace(chunk_tokens=8, chunk_keys=[KEYS[chunk] for chunk in chunks])
    first = chunks.start * 2
    request = SimpleNamespace(block_hashes=HASHES[first : first + hashes], lora_request=lora)
    return Followed(request, cast(Any, sequence))


def stored(chunk: int, tier: Tier = Tier.DRAM) -> Stored:
    tokens = struct.pack("<8i", *range(chunk * 8, chunk * 8 + 8))
    parent = KEYS[chunk - 1] if chunk else None
    return Stored(KEYS[chunk], tier, Content(NAMESPACE, bytes(32), parent, tokens))


def came(chunk: int, tier: Tier = Tier.DRAM, lora: Any = None) -> BlocksCame:
    parent = HASHES[2 * chunk - 1] if chunk else None
    both = (HASHES[2 * chunk], HASHES[2 * chunk + 1])
    return BlocksCame(tier, both, parent, tuple(range(chunk * 8, chunk * 8 + 8)), lora)


def left(*chunks: int, tier: Tier = Tier.DRAM) -> BlocksLeft:
    hashes = [each for chunk in chunks for each in HASHES[2 * chunk : 2 * chunk + 2]]
    return BlocksLeft(tier, tuple(hashes))


def test_a_chunk_is_told_tier_by_tier(feed: Feed) -> None:
    desk = desk_of(feed)
    desk.note(followed(range(2)))
    feed.events = [stored(0), stored(1), stored(0, Tier.DISK), Removed(KEYS[0], Tier.DRAM)]
    assert desk.take() == [came(0), came(1), came(0, Tier.DISK), left(0)]
    feed.events = [Removed(KEYS[0], Tier.DISK), stored(0)]
    # It is known still, so it is told when it comes back.
    assert desk.take() == [left(0, tier=Tier.DISK), came(0)]


def test_what_no_request_stood_for_is_not_told(feed: Feed) -> None:
    desk = desk_of(feed)
    feed.events = [stored(0), Removed(KEYS[0], Tier.DRAM)]
    assert desk.take() == []


def test_a_chunk_is_named_once_vllm_has_hashed_all_of_its_blocks(feed: Feed) -> None:
    desk = desk_of(feed)
    request = followed(range(2), hashes=3)
    desk.note(request)
    assert request.named_chunks == 1
    request.request.block_hashes = HASHES[:4]
    desk.note(request)
    feed.events = [stored(0), stored(1)]
    assert desk.take() == [came(0), came(1)]


def test_an_adapter_is_told_in_vllms_words(feed: Feed) -> None:
    desk = desk_of(feed)
    lora = SimpleNamespace(lora_int_id=3, lora_name="poet")
    desk.note(followed(range(1), lora=lora))
    feed.events = [stored(0)]
    assert desk.take() == [came(0, lora=(3, "poet"))]


def test_when_the_feed_begins_anew_all_is_taken_back_first(feed: Feed) -> None:
    desk = desk_of(feed)
    desk.note(followed(range(2)))
    feed.events = [stored(0), stored(1), stored(1, Tier.DISK)]
    desk.take()
    feed.events = [Cleared(), stored(1)]
    assert desk.take() == [left(1, tier=Tier.DISK), left(0, 1), came(1)]


def test_a_reset_takes_back_and_is_followed_by_nothing_of_before(feed: Feed) -> None:
    desk = desk_of(feed)
    desk.note(followed(range(2)))
    feed.events = [stored(0)]
    desk.take()
    desk.forget()
    feed.events = [stored(1), Removed(KEYS[0], Tier.DRAM)]
    assert desk.take() == [left(0)]


def test_names_of_what_is_nowhere_are_bounded(feed: Feed) -> None:
    desk = desk_of(feed, names_max=2)
    desk.note(followed(range(4)))
    feed.events = [stored(chunk) for chunk in range(4)]
    # The oldest are forgotten, and those that are told do not count.
    assert desk.take() == [came(2), came(3)]
    desk.note(followed(range(2)))
    feed.events = [stored(0), stored(1)]
    assert desk.take() == [came(0), came(1)]


def test_a_call_tells_a_bounded_number_and_the_next_one_the_rest(feed: Feed) -> None:
    desk = desk_of(feed)
    desk.note(followed(range(1)))
    feed.events = [stored(0), Removed(KEYS[0], Tier.DRAM)] * 50
    assert [len(desk.take()) for _ in range(3)] == [64, 36, 0]
