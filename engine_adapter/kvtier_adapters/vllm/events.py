"""What the tiers hold, told in the words of vLLM's KV events, for those who route requests.

Where vLLM tells of blocks and the cache of chunks, a chunk is told as its blocks: by the hashes
that vLLM has for them, which are also those of its own events for HBM.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.cache.event_feed import EventFeed
from kvtier.constants import EVENT_CHUNKS_MAX, EVENTS_TAKEN_MAX, TOKEN_BYTES
from kvtier.obs.events import Cleared, Removed, Stored
from kvtier.types import ChunkKey, Tier
from kvtier_adapters.vllm.requests import Followed


@dataclass(frozen=True, slots=True)
class BlocksCame:
    """A tier has these blocks of one chunk. ``parent`` is the hash of the block before them."""

    tier: Tier
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    lora: tuple[int, str] | None


@dataclass(frozen=True, slots=True)
class BlocksLeft:
    """A tier has these blocks no more."""

    tier: Tier
    hashes: tuple[bytes, ...]


BlockEvent = BlocksCame | BlocksLeft


@dataclass(slots=True, eq=False)
class _Name:
    """A chunk in vLLM's words, and the tiers that were told to have it."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    lora: tuple[int, str] | None
    tiers: set[Tier] = field(default_factory=set)


class EventDesk:
    """Turns a cache's events into vLLM's. One thread, the scheduler's.

    A chunk is told if a request that this engine has seen stands for it; others have no hashes. At
    most ``names_max`` of those that are in no tier are remembered; the feed bounds the others.
    """

    def __init__(
        self, feed: EventFeed, block_tokens: int, names_max: int = EVENT_CHUNKS_MAX
    ) -> None:
        self._feed = feed
        self._block_tokens = block_tokens
        self._names_max = names_max
        self._told: dict[ChunkKey, _Name] = {}
        self._untold: OrderedDict[ChunkKey, _Name] = OrderedDict()
        self._waiting: list[BlockEvent] = []

    def note(self, followed: Followed) -> None:
        """Take the hashes of a request's chunks, before the next ``take``.

        A request has none where vLLM caches no prefixes, and for blocks that are not full.
        """
        sequence, hashes = followed.sequence, followed.request.block_hashes
        size = sequence.chunk_tokens // self._block_tokens
        end = min(len(sequence.chunk_keys), len(hashes) // size)
        lora = followed.request.lora_request
        adapter = (int(lora.lora_int_id), str(lora.lora_name)) if lora else None
        for chunk in range(followed.named_chunks, end):
            key, start = sequence.chunk_keys[chunk], chunk * size
            if key not in self._told:
                parent = hashes[start - 1] if start else None
                name = _Name(tuple(hashes[start : start + size]), parent, adapter)
                self._keep_untold(key, name)
        followed.named_chunks = max(followed.named_chunks, end)

    def take(self) -> list[BlockEvent]:
        """Return what is to be told next: some events, the rest with the next calls."""
        found, self._waiting = self._waiting, []
        for event in self._feed.take(EVENTS_TAKEN_MAX):
            if isinstance(event, Cleared):
                # vLLM's own word for it would take back what HBM holds, too.
                found += self._take_back()
            elif isinstance(event, Removed):
                found += self._left(event)
            else:
                found += self._came(event)
        return found

    def forget(self) -> None:
        """Take all back that was told, and tell no more of it: a reset has made it unreachable."""
        self._waiting += self._take_back()
        self._untold.clear()

    def _came(self, event: Stored) -> Iterable[BlockEvent]:
        name = self._told.get(event.key) or self._untold.pop(event.key, None)
        if name is None:
            return ()
        self._told[event.key] = name
        name.tiers.add(event.tier)
        data = event.content.tokens
        tokens = struct.unpack(f"<{len(data) // TOKEN_BYTES}i", data)
        return (BlocksCame(event.tier, name.hashes, name.parent, tokens, name.lora),)

    def _left(self, event: Removed) -> Iterable[BlockEvent]:
        name = self._told.get(event.key)
        if name is None or event.tier not in name.tiers:
            return ()
        name.tiers.discard(event.tier)
        if not name.tiers:
            self._keep_untold(event.key, self._told.pop(event.key))
        return (BlocksLeft(event.tier, name.hashes),)

    def _take_back(self) -> list[BlockEvent]:
        told, self._told = self._told, {}
        hashes: dict[Tier, list[bytes]] = {}
        for key, name in told.items():
            for tier in name.tiers:
                hashes.setdefault(tier, []).extend(name.hashes)
            name.tiers.clear()
            self._keep_untold(key, name)
        return [BlocksLeft(tier, tuple(those)) for tier, those in sorted(hashes.items())]

    def _keep_untold(self, key: ChunkKey, name: _Name) -> None:
        self._untold[key] = name
        self._untold.move_to_end(key)
        if len(self._untold) > self._names_max:
            self._untold.popitem(last=False)
