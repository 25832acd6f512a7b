"""KV events: what the tiers hold, told as it changes, in the format of vLLM's KV events.

A reader that takes all events in their order knows at any time a part of what the tiers hold, and
nothing that they do not hold:

- A chunk is told once its tokens and its parent are known, so what an index at rest brought back
  is told when it is first used. Each parent has been told before its child.
- Where more events come than are taken, they are dropped and counted. The next one then says that
  all blocks are cleared, and what is held is told anew, a part with each taking.

Format (``vllm/distributed/kv_events.py`` of vLLM 0.32): a batch is a msgpack array of time, events
and data-parallel rank; an event is a map whose ``type`` is the name of its class.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from kvtier.constants import EVENT_CHUNKS_MAX, EVENTS_QUEUED_MAX, TOKEN_BYTES
from kvtier.types import ChunkKey, Namespace, Tier

#: vLLM's words for where a block lies, and whether its publisher reads it from a medium of its own.
_MEDIUM: Final = {Tier.DRAM: ("CPU", "LOCAL"), Tier.DISK: ("STORAGE", "LOCAL")}
_ELSEWHERE: Final = ("STORAGE", "REMOTE")
#: Chunks of ended epochs that are taken back one by one: a millisecond or two under the lock.
_TAKEN_BACK_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Content:
    """What a chunk stands for. ``tokens`` are little-endian int32; ``root`` that of its epoch."""

    namespace: Namespace
    root: bytes
    parent: ChunkKey | None
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk can be loaded from a tier."""

    key: ChunkKey
    tier: Tier
    content: Content


@dataclass(frozen=True, slots=True)
class Removed:
    """A chunk that was told to be in a tier has left it."""

    key: ChunkKey
    tier: Tier


@dataclass(frozen=True, slots=True)
class Cleared:
    """Whatever was told before counts no more."""


Event = Stored | Removed | Cleared


@dataclass(slots=True, eq=False)
class _Chunk:
    """``told`` are the tiers that the reader knows of, if it is of the present ``telling``."""

    records: int = 0
    ready: set[Tier] = field(default_factory=set)
    content: Content | None = None
    told: set[Tier] = field(default_factory=set)
    telling: int = 0


class EventLog:
    """Turns what tiers take in and give up into events. Used under the cache's lock.

    At most ``queued_max`` events wait, more than there are tiers, and at most ``chunks_max`` chunks
    are told of; what comes beyond stays untold and is counted.
    """

    def __init__(
        self, queued_max: int = EVENTS_QUEUED_MAX, chunks_max: int = EVENT_CHUNKS_MAX
    ) -> None:
        self._queued_max = queued_max
        self._chunks_max = chunks_max
        self._chunks: dict[ChunkKey, _Chunk] = {}
        #: Chunks whose content is known, by its root.
        self._known: dict[bytes, dict[ChunkKey, None]] = {}
        self._known_count = 0
        #: Roots of which nothing is told any more, though chunks of theirs are still there.
        self._ended: set[bytes] = set()
        self._namespaces: dict[bytes, Namespace] = {}
        #: Children, by the parent that has to be told before them.
        self._waiting: dict[ChunkKey, dict[ChunkKey, None]] = {}
        self._queue: deque[Event] = deque()
        self._next: deque[ChunkKey] = deque()
        self._telling = 0
        self.dropped_count = 0
        self.untold_count = 0

    def added(self, key: ChunkKey) -> None:
        """Note that a tier has begun to take a chunk in."""
        self._chunks.setdefault(key, _Chunk()).records += 1

    def ready(self, key: ChunkKey, tier: Tier) -> None:
        """Note that a chunk can be read from a tier, which had ``added`` it."""
        self._chunks[key].ready.add(tier)
        self._tell(key)

    def removed(self, key: ChunkKey, tier: Tier) -> None:
        """Note that a chunk, readable or not, has no place in a tier any more."""
        chunk = self._chunks[key]
        chunk.records -= 1
        chunk.ready.discard(tier)
        if tier in self._told(chunk):
            chunk.told.discard(tier)
            self._emit(Removed(key, tier))
        if not chunk.records:
            self._forget_content(key, chunk)
            del self._chunks[key]

    def wants(self, key: ChunkKey) -> bool:
        """Tell whether to ``learn`` what a chunk stands for."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.content is None

    def learn(self, key: ChunkKey, content: Content) -> None:
        """Take in what a wanted chunk stands for. Its namespace is in its present epoch."""
        if self._known_count >= self._chunks_max:
            self.untold_count += 1
            return
        self._chunks[key].content = content
        self._known_count += 1
        self._known.setdefault(content.root, {})[key] = None
        self._namespaces[content.root] = content.namespace
        self._tell(key)

    def keep(self, current: Callable[[Namespace], bytes]) -> None:
        """Take back what was told of epochs that have ended; ``current`` gives the present root.

        Where that is much, everything else is told anew instead, which takes no time here.
        """
        ended = {
            root
            for root, of in self._namespaces.items()
            if root not in self._ended and current(of) != root
        }
        if sum(len(self._known[root]) for root in ended) > _TAKEN_BACK_MAX:
            self._ended |= ended
            self.begin_anew()
            return
        for key in [key for root in ended for key in self._known[root]]:
            chunk = self._chunks[key]
            told, chunk.told = self._told(chunk), set()
            self._forget_content(key, chunk)
            for tier in sorted(told):
                self._emit(Removed(key, tier))

    def begin_anew(self) -> None:
        """Tell everything once more, for a reader that knows nothing or has missed something."""
        self._queue.clear()
        self._queue.append(Cleared())
        self._waiting.clear()
        self._telling += 1
        self._next = deque(self._chunks)

    def take(self, count_max: int) -> list[Event]:
        """Return what is to be told next, some ``count_max`` events."""
        # What is told here never makes the queue overflow: that would begin it all again.
        wanted = min(count_max, self._queued_max - len(Tier))
        while len(self._queue) < wanted and self._next:
            self._tell(self._next.popleft())
        return [self._queue.popleft() for _ in range(min(count_max, len(self._queue)))]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        known = {key for key, chunk in self._chunks.items() if chunk.content is not None}
        listed = set().union(*self._known.values())
        if known != listed or len(known) != self._known_count:
            raise AssertionError(f"{self._known_count} chunks are known, {len(known)} found")
        for key, chunk in self._chunks.items():
            if not self._told(chunk) <= chunk.ready or len(chunk.ready) > chunk.records:
                raise AssertionError(f"{key.hex()} is told of where it is not")

    def _tell(self, key: ChunkKey) -> None:
        """Tell of a chunk where it is ready; those that have waited for it come next."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.content is None or chunk.content.root in self._ended:
            return
        untold = chunk.ready - self._told(chunk)
        if not untold:
            return
        parent = chunk.content.parent
        above = None if parent is None else self._chunks.get(parent)
        if parent is not None and (above is None or not self._told(above)):
            self._waiting.setdefault(parent, {})[key] = None
            return
        chunk.told |= untold
        self._next.extend(self._waiting.pop(key, ()))
        for tier in sorted(untold):
            if not self._emit(Stored(key, tier, chunk.content)):
                break

    def _told(self, chunk: _Chunk) -> set[Tier]:
        if chunk.telling != self._telling:
            chunk.telling = self._telling
            chunk.told = set()
        return chunk.told

    def _emit(self, event: Event) -> bool:
        """Queue an event; False: it and all before it are dropped, and everything is told anew."""
        if len(self._queue) < self._queued_max:
            self._queue.append(event)
            return True
        self.dropped_count += len(self._queue) + 1
        self.begin_anew()
        return False

    def _forget_content(self, key: ChunkKey, chunk: _Chunk) -> None:
        content, chunk.content = chunk.content, None
        if content is None:
            return
        self._known_count -= 1
        del self._known[content.root][key]
        if not self._known[content.root]:
            del self._known[content.root], self._namespaces[content.root]
            self._ended.discard(content.root)
        if content.parent in self._waiting:
            siblings = self._waiting[content.parent]
            siblings.pop(key, None)
            if not siblings:
                del self._waiting[content.parent]


def encode_batch(events: Iterable[Event], time_s: float) -> bytes:
    """Return one message's payload. ``time_s`` is in seconds of Unix time."""
    packed: bytes = msgpack.packb([time_s, [_fields(event) for event in events], None])
    return packed


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    medium, locality = _MEDIUM.get(event.tier, _ELSEWHERE)
    place = {"medium": medium, "locality": locality, "ownership": event.tier.value}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": [event.key], **place}
    content = event.content
    tokens = struct.unpack(f"<{len(content.tokens) // TOKEN_BYTES}i", content.tokens)
    return {
        "type": "BlockStored",
        "block_hashes": [event.key],
        "parent_block_hash": content.parent,
        "token_ids": tokens,
        "block_size": len(tokens),
        "lora_id": None,
        "lora_name": content.namespace.adapter_id or None,
        **place,
    }
