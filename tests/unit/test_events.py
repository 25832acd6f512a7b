"""The event log: what is told, in which order, within which bounds, and in whose format."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import msgspec
import pytest

from kvtier.constants import EVENT_CHUNKS_MAX, EVENTS_QUEUED_MAX
from kvtier.keys import encode_tokens
from kvtier.obs.events import (
    Cleared,
    Content,
    Event,
    EventLog,
    Removed,
    Stored,
    encode_batch,
)
from kvtier.types import ChunkKey, KVLayout, Namespace, Tier

ROOT = b"r" * 32
NAMESPACE = Namespace("weights", KVLayout((), chunk_tokens=4), adapter_id="adapter")
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(1, 9)]


def content(number: int, root: bytes = ROOT) -> Content:
    """What the chunk of that place in a line of eight stands for."""
    parent = KEYS[number - 1] if number else None
    return Content(NAMESPACE, root, parent, encode_tokens(range(number * 4, number * 4 + 4)))


def stores(log: EventLog, *numbers: int, tier: Tier = Tier.DRAM) -> None:
    for number in numbers:
        log.added(KEYS[number])
        if log.wants(KEYS[number]):
            log.learn(KEYS[number], content(number))
        log.ready(KEYS[number], tier)


def told(log: EventLog) -> list[tuple[str, int]]:
    """Take everything: what happened to which chunk of the line."""
    events = itertools.chain.from_iterable(iter(lambda: log.take(3), []))
    return [
        ("cleared", -1) if isinstance(e, Cleared) else (type(e).__name__.lower(), KEYS.index(e.key))
        for e in events
    ]


def test_filling_is_told_to_nobody() -> None:
    log = EventLog()
    log.added(KEYS[0])
    log.learn(KEYS[0], content(0))
    assert log.take(9) == []
    log.ready(KEYS[0], Tier.DRAM)
    assert log.take(9) == [Stored(KEYS[0], Tier.DRAM, content(0))]


def test_what_never_became_ready_leaves_in_silence() -> None:
    log = EventLog()
    log.added(KEYS[0])
    log.learn(KEYS[0], content(0))
    log.removed(KEYS[0], Tier.DRAM)
    assert log.take(9) == []
    assert not log.wants(KEYS[0])
    log.check_integrity()


def test_a_chunk_waits_for_its_parent() -> None:
    log = EventLog()
    stores(log, 3, 2, 1)
    assert told(log) == []
    stores(log, 0)
    assert told(log) == [("stored", number) for number in range(4)]


def test_a_parent_that_has_left_is_waited_for_again() -> None:
    log = EventLog()
    stores(log, 0)
    log.removed(KEYS[0], Tier.DRAM)
    stores(log, 1)
    assert told(log) == [("stored", 0), ("removed", 0)]
    stores(log, 0)
    assert told(log) == [("stored", 0), ("stored", 1)]
    log.check_integrity()


def test_a_child_that_has_left_is_waited_for_no_more() -> None:
    log = EventLog()
    stores(log, 1)
    log.removed(KEYS[1], Tier.DRAM)
    stores(log, 0)
    assert told(log) == [("stored", 0)]


def test_each_tier_is_told_for_itself() -> None:
    log = EventLog()
    stores(log, 0)
    stores(log, 0, tier=Tier.DISK)
    log.removed(KEYS[0], Tier.DRAM)
    assert log.take(9) == [
        Stored(KEYS[0], Tier.DRAM, content(0)),
        Stored(KEYS[0], Tier.DISK, content(0)),
        Removed(KEYS[0], Tier.DRAM),
    ]
    log.removed(KEYS[0], Tier.DISK)
    assert log.take(9) == [Removed(KEYS[0], Tier.DISK)]


def test_what_is_learned_late_is_told_late() -> None:
    log = EventLog()
    log.added(KEYS[0])
    log.ready(KEYS[0], Tier.DISK)
    assert log.take(9) == []
    assert log.wants(KEYS[0])
    log.learn(KEYS[0], content(0))
    assert told(log) == [("stored", 0)]


def test_more_than_may_wait_is_dropped_counted_and_told_anew() -> None:
    log = EventLog(queued_max=6)
    stores(log, *range(6))
    assert log.dropped_count == 0
    log.removed(KEYS[5], Tier.DRAM)
    assert log.dropped_count == 7
    assert told(log) == [("cleared", -1), *(("stored", number) for number in range(5))]


def test_more_may_wait_for_a_parent_than_may_be_queued() -> None:
    log = EventLog(queued_max=6)
    stores(log, *range(1, 8))
    stores(log, 0)
    assert told(log) == [("stored", number) for number in range(8)]
    assert log.dropped_count == 0


def test_to_tell_anew_in_the_worst_order_comes_to_an_end() -> None:
    log = EventLog(queued_max=5)
    stores(log, *reversed(range(8)))
    stores(log, *range(8), tier=Tier.DISK)
    log.begin_anew()
    assert told(log) == [("cleared", -1), *(("stored", n) for n in range(8) for _ in range(2))]


def test_to_ask_for_more_than_may_wait_drops_nothing() -> None:
    log = EventLog(queued_max=len(Tier) + 1)
    stores(log, *range(8))
    stores(log, *range(8), tier=Tier.DISK)
    log.begin_anew()
    dropped = log.dropped_count
    events = [event for _ in range(99) for event in log.take(99)]
    assert len(events) == 1 + 2 * 8
    assert log.dropped_count == dropped


def test_a_removal_is_never_lost_to_whoever_reads_late() -> None:
    log = EventLog(queued_max=6)
    stores(log, 0, 1)
    assert told(log) == [("stored", 0), ("stored", 1)]
    stores(log, *range(2, 8))
    log.removed(KEYS[1], Tier.DRAM)
    assert told(log) == [("cleared", -1), ("stored", 0)], "the others cannot be reached now"
    stores(log, 1)
    assert told(log) == [("stored", number) for number in range(1, 8)]


def test_the_limits_of_production_hold_without_being_reached() -> None:
    log = EventLog()
    stores(log, *range(8))
    assert len(told(log)) == 8 < EVENTS_QUEUED_MAX < EVENT_CHUNKS_MAX


def test_no_more_chunks_are_known_than_may_be() -> None:
    log = EventLog(chunks_max=2)
    stores(log, 0, 1, 2)
    assert told(log) == [("stored", 0), ("stored", 1)]
    assert log.untold_count == 1
    log.removed(KEYS[1], Tier.DRAM)
    log.learn(KEYS[2], content(2))
    stores(log, 1)
    assert told(log) == [("removed", 1)], "the room for it went to its child"


def test_an_epoch_that_has_ended_is_taken_back_whole() -> None:
    log = EventLog()
    stores(log, 0, 1)
    log.added(KEYS[2])
    log.learn(KEYS[2], content(2))
    log.keep(lambda namespace: ROOT)
    assert told(log) == [("stored", 0), ("stored", 1)]
    log.keep(lambda namespace: b"n" * 32)
    assert told(log) == [("removed", 0), ("removed", 1)]
    log.ready(KEYS[2], Tier.DRAM)
    log.removed(KEYS[0], Tier.DRAM)
    assert told(log) == []
    log.check_integrity()


def test_a_large_epoch_that_has_ended_is_left_out_of_what_is_told_anew() -> None:
    """So the time under the lock does not grow with it."""
    log = EventLog()
    stores(log, 0)
    assert told(log) == [("stored", 0)]
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(10_000, 11_100)]
    old = Content(NAMESPACE, b"o" * 32, None, encode_tokens([1]))
    for key in keys:
        log.added(key)
        log.learn(key, old)
        log.ready(key, Tier.DRAM)
    while log.take(99):
        pass
    log.keep(lambda namespace: ROOT)
    assert told(log) == [("cleared", -1), ("stored", 0)]
    log.keep(lambda namespace: ROOT)
    log.check_integrity()
    assert told(log) == [], "it has ended once"
    for key in keys:
        log.removed(key, Tier.DRAM)
    log.begin_anew()
    assert told(log) == [("cleared", -1), ("stored", 0)]
    log.check_integrity()


# As vLLM 0.32 declares them in vllm/distributed/kv_events.py; fields behind these have defaults.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def decoded(*events: Event) -> KVEventBatch:
    return msgspec.msgpack.decode(encode_batch(events, 12.5), type=KVEventBatch)


def test_vllms_structs_read_a_batch() -> None:
    batch = decoded(Cleared(), Stored(KEYS[1], Tier.DRAM, content(1)), Removed(KEYS[1], Tier.DISK))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, None)
    cleared, stored, removed = batch.events
    assert cleared == AllBlocksCleared()
    assert stored == BlockStored(
        [KEYS[1]], KEYS[0], [4, 5, 6, 7], 4, None, "CPU", "adapter",
        locality="LOCAL", ownership="dram",
    )  # fmt: skip
    assert removed == BlockRemoved([KEYS[1]], "STORAGE", locality="LOCAL", ownership="disk")


def test_vllms_own_encoder_writes_the_same_bytes_for_what_is_set() -> None:
    ours = msgspec.msgpack.decode(encode_batch([Removed(KEYS[0], Tier.DRAM)], 1.0))
    theirs = msgspec.msgpack.encode(
        KVEventBatch(1.0, [BlockRemoved([KEYS[0]], "CPU", locality="LOCAL", ownership="dram")])
    )
    assert msgspec.msgpack.decode(theirs)[:2] == ours[:2]


def test_tokens_are_told_whatever_their_size() -> None:
    tokens = [0, 1, 255, 256, 65_536, 2**31 - 1]
    packed = struct.pack("<6i", *tokens)
    (stored,) = decoded(Stored(KEYS[0], Tier.DRAM, Content(NAMESPACE, ROOT, None, packed))).events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == tokens
    assert stored.parent_block_hash is None


def test_no_salt_is_told() -> None:
    namespace = Namespace("weights", KVLayout(()), tenant_salt="sesame")
    message = encode_batch([Stored(KEYS[0], Tier.DRAM, Content(namespace, ROOT, None, b""))], 0.0)
    assert b"sesame" not in message
    assert b"weights" not in message


@pytest.mark.parametrize("count", [1, 5])
def test_no_more_is_taken_than_asked_for(count: int) -> None:
    log = EventLog()
    stores(log, *range(8))
    log.begin_anew()
    assert len(log.take(count)) == count
