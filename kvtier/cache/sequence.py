"""A request's tokens, hashed as they come."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable

from kvtier.constants import DIGEST_BYTES, PIN_S_MAX, TOKEN_BYTES, TTL_S_MAX
from kvtier.errors import ConfigError
from kvtier.keys import encode_tokens, extend_chain
from kvtier.obs.events import Content, EventLog
from kvtier.types import ChunkKey, Features, KVLayout, MissReason, Namespace, Placement, Tier

_FEATURES_DEFAULT = Features()


class Sequence:
    """The chunk keys of a growing token sequence; appending costs O(new tokens).

    Holds keys and at most one unfinished chunk's tokens. Not thread-safe: one owner.
    """

    def __init__(
        self,
        namespace: Namespace,
        root: bytes,
        *,
        features: Features = _FEATURES_DEFAULT,
        keep_tokens: bool = False,
    ) -> None:
        """Start an empty sequence. ``root`` is the namespace's digest at its current epoch.

        With ``keep_tokens`` it can tell what its complete chunks stand for. Raises ``ConfigError``
        for a root or a time of the features that cannot be.
        """
        if features is not _FEATURES_DEFAULT:
            _check_times(features)
        if len(root) != DIGEST_BYTES:
            raise ConfigError(f"root has {len(root)} bytes; a namespace digest has {DIGEST_BYTES}")
        self._namespace = namespace
        self._root = root
        self._features = features
        self._chunk_bytes = namespace.layout.chunk_tokens * TOKEN_BYTES
        self._chunk_keys: list[ChunkKey] = []
        self._unfinished = b""
        self._contents: list[Content] | None = [] if keep_tokens else None
        #: Until when its lookups wait for a remote; None: nothing is asked for it.
        self.pending_until: float | None = None
        #: Since when its request waits for what a remote says, and for nothing else.
        self.asked_s: float | None = None
        self.touched = False  # Whether its request was noted as an access to what was found.
        #: Chunks that came up into DRAM for it before it had blocks, and where they lay.
        self.prefetched: dict[int, Tier] = {}
        #: How many of its first chunks the engine has from a lossy codec.
        self.lossy_chunks = 0
        #: Why its last store ordered less than was asked for; None: nothing was refused.
        self.refused: MissReason | None = None
        #: Where what is counted ends of its chunks that found a staging area crowded.
        self.crowded_end = 0

    @property
    def namespace(self) -> Namespace:
        """What makes this sequence's KV incompatible with others."""
        return self._namespace

    @property
    def layout(self) -> KVLayout:
        """How its chunks are cut into shards."""
        return self._namespace.layout

    @property
    def codec(self) -> str | None:
        """The one codec that its chunks are packed with; None: what is configured."""
        return None

    def takes(self, codec: str) -> bool:
        """Tell whether what a codec packed may be used for it, as far as it is known here."""
        return self.codec in (None, codec)

    @property
    def workers(self) -> tuple[Placement, ...] | None:
        """Who moves its chunks; None: the workers that are configured."""
        return None

    @property
    def root(self) -> bytes:
        """The digest that the first chunk's key is chained to."""
        return self._root

    @property
    def features(self) -> Features:
        """What the caller knows of the session, for policies."""
        return self._features

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a complete chunk."""
        return self.layout.chunk_tokens

    @property
    def token_count(self) -> int:
        """Tokens appended so far."""
        return len(self._chunk_keys) * self.chunk_tokens + len(self._unfinished) // TOKEN_BYTES

    @property
    def chunk_keys(self) -> list[ChunkKey]:
        """Keys of the complete chunks: the sequence's own list, which callers do not change."""
        return self._chunk_keys

    def came_from(self, chunk: int, tier: Tier) -> Tier:
        """Return the tier that gave a chunk, now found in ``tier``: what a prefetch has moved
        counts for where it lay.
        """
        return self.prefetched.get(chunk, tier) if tier is Tier.DRAM else tier

    def append(self, tokens: collections.abc.Sequence[int]) -> None:
        """Add tokens at the end and key every chunk that they complete.

        Raises ``LayoutError`` for a token outside 0 .. 2**31 - 1, and then has added none.
        """
        data = memoryview(self._unfinished + encode_tokens(tokens))
        parent: bytes = self._chunk_keys[-1] if self._chunk_keys else self._root
        complete = len(data) - len(data) % self._chunk_bytes
        for start in range(0, complete, self._chunk_bytes):
            tokens = data[start : start + self._chunk_bytes]
            if self._contents is not None:
                above = self.entry_parent(len(self._chunk_keys))
                self._contents.append(Content(self._namespace, self._root, above, bytes(tokens)))
            parent = extend_chain(parent, tokens)
            self._chunk_keys.append(ChunkKey(parent))
        self._unfinished = bytes(data[complete:])

    def teach(self, events: EventLog, chunks: Iterable[int]) -> None:
        """Tell ``events`` what those of some complete chunks stand for that it wants to know."""
        if self._contents is None:
            return
        for chunk in chunks:
            if events.wants(self._chunk_keys[chunk]):
                events.learn(self._chunk_keys[chunk], self._contents[chunk])

    def entry_parent(self, index: int) -> ChunkKey | None:
        """Return the key of the chunk before chunk ``index``; None for the first one.

        ``index`` may be that of the unfinished chunk, whose tail would follow the last key.
        """
        assert 0 <= index <= len(self._chunk_keys), f"chunk {index} of {len(self._chunk_keys)}"
        return self._chunk_keys[index - 1] if index else None


def _check_times(features: Features) -> None:
    for name, seconds_max in (("ttl_s", TTL_S_MAX), ("pin_s", PIN_S_MAX)):
        seconds = getattr(features, name)
        if not 0 <= seconds <= seconds_max:  # Not a number is neither.
            raise ConfigError(f"{name} = {seconds!r}: allowed is 0 to {seconds_max:g}")
