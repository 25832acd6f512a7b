"""The publisher of KV events, read by a real ZeroMQ subscriber."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvtier.constants import EVENTS_TAKEN_MAX
from kvtier.errors import ConfigError
from kvtier.obs.event_publisher import EventPublisher
from kvtier.obs.events import Cleared, Event, Removed
from kvtier.testing.clock import FakeClock
from kvtier.types import ChunkKey, Tier

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(4)]
TIMEOUT_MS = 20_000
POLL_MS = 20


class Source:
    """Events by hand. ``anew`` is set whenever everything is to be told again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: deque[Event] = deque()
        self.held: list[Event] = []
        self.anew = threading.Semaphore(0)

    def take(self, count_max: int) -> list[Event]:
        with self.lock:
            return [self.events.popleft() for _ in range(min(count_max, len(self.events)))]

    def begin_anew(self) -> None:
        with self.lock:
            self.events.clear()
            self.events += [Cleared(), *self.held]
        self.anew.release()

    def tell(self, *events: Event) -> None:
        with self.lock:
            self.events += events


@contextmanager
def subscribed(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        yield socket
    finally:
        context.destroy(linger=0)


@contextmanager
def published(source: Source, **how: Any) -> Iterator[EventPublisher]:
    publisher = EventPublisher("tcp://127.0.0.1:0", **{"clock": FakeClock(), **how})
    publisher.start(source)
    try:
        yield publisher
    finally:
        publisher.close()


def wait_until_heard(source: Source, socket: zmq.Socket[bytes]) -> None:
    """Tell something until it arrives: only then the publisher knows of the subscription."""
    for _ in range(TIMEOUT_MS // POLL_MS):
        source.tell(Removed(KEYS[2], Tier.DRAM))
        if socket.poll(POLL_MS):
            return
    raise AssertionError("a subscription is not heard of")


def received(socket: zmq.Socket[bytes]) -> tuple[int, float, list[dict[str, Any]]]:
    """A message: its number, its time and its events."""
    topic, number, payload = socket.recv_multipart()
    assert topic == b""
    time_s, events, rank = msgspec.msgpack.decode(payload)
    assert rank is None
    return int.from_bytes(number, "big"), time_s, events


def test_a_subscriber_is_told_everything_and_then_what_changes() -> None:
    source = Source()
    source.held = [Removed(KEYS[0], Tier.DRAM)]
    with published(source, wall=lambda: 7.5) as publisher, subscribed(publisher.endpoint) as socket:
        number, time_s, events = received(socket)
        assert (number, time_s) == (0, 7.5)
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockRemoved"]
        source.tell(Removed(KEYS[1], Tier.DISK))
        number, _, events = received(socket)
        assert number == 1
        assert events[0]["block_hashes"] == [KEYS[1]]


def test_another_subscriber_makes_everything_be_told_again() -> None:
    source, clock = Source(), FakeClock()
    with published(source, clock=clock) as publisher, subscribed(publisher.endpoint) as first:
        assert received(first)[2] == [{"type": "AllBlocksCleared"}]
        clock.advance(10)
        with subscribed(publisher.endpoint) as second:
            assert received(second)[2] == [{"type": "AllBlocksCleared"}]
        assert received(first)[0] == 1


def test_many_subscribers_at_once_are_told_together() -> None:
    source, clock = Source(), FakeClock()
    with published(source, clock=clock) as publisher, subscribed(publisher.endpoint) as first:
        received(first)
        assert source.anew.acquire(timeout=20)
        with (
            subscribed(publisher.endpoint) as second,
            subscribed(publisher.endpoint) as last,
        ):
            for socket in (second, last):
                wait_until_heard(source, socket)
            assert not source.anew.acquire(blocking=False), "it was told a moment ago"
            clock.advance(10)
            for socket in (second, last):
                while {"type": "AllBlocksCleared"} not in received(socket)[2]:
                    pass
            assert source.anew.acquire(blocking=False)
            assert not source.anew.acquire(blocking=False), "told to each by itself"


def test_messages_are_numbered_without_a_gap() -> None:
    source = Source()
    with published(source) as publisher, subscribed(publisher.endpoint) as socket:
        numbers = [received(socket)[0]]
        for key in KEYS:
            source.tell(Removed(key, Tier.DRAM))
            numbers.append(received(socket)[0])
    assert numbers == list(range(5))


def test_a_message_has_so_many_events_and_no_more() -> None:
    source = Source()
    source.held = [Removed(KEYS[0], Tier.DRAM)] * EVENTS_TAKEN_MAX
    with published(source) as publisher, subscribed(publisher.endpoint) as socket:
        assert [len(received(socket)[2]) for _ in range(2)] == [EVENTS_TAKEN_MAX, 1]


def test_the_last_events_are_sent_at_the_end() -> None:
    source = Source()
    with published(source) as publisher, subscribed(publisher.endpoint) as socket:
        received(socket)
        source.tell(Removed(KEYS[3], Tier.DRAM))
        publisher.close()
        assert received(socket)[2][0]["block_hashes"] == [KEYS[3]]
        publisher.close()


def test_an_endpoint_that_is_taken_is_refused() -> None:
    with published(Source()) as publisher, pytest.raises(ConfigError, match="in use"):
        EventPublisher(publisher.endpoint, clock=FakeClock())


def test_what_is_no_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        EventPublisher("nonsense", clock=FakeClock())


def test_one_that_was_never_started_gives_its_endpoint_back() -> None:
    publisher = EventPublisher("tcp://127.0.0.1:0", clock=FakeClock())
    publisher.close()
    again = EventPublisher(publisher.endpoint, clock=FakeClock())
    again.close()
