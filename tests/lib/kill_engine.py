"""An engine without a pool: it packs patterned bytes into the cache's arena and checks them there.

Needs no torch, so that a process with a real cache in it starts in no time. The bytes of a section
follow from its chunk's key, so that one that is stale, swapped or half read is recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.cache.cache import Cache
from kvtier.cache.match import Pending, Ready
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.sections import section_offset
from kvtier.testing.engine_double import wait_until
from kvtier.types import (
    DTYPE_BYTES,
    Blocks,
    ChunkKey,
    GroupKind,
    KVGroup,
    KVLayout,
    Move,
    Namespace,
    Plan,
    Result,
)

CHUNK_TOKENS = 32
BLOCK_TOKENS = 4
SHARDS = 2
_FULL = KVGroup(GroupKind.FULL, (0, 2), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
_MORE = KVGroup(GroupKind.FULL, (1,), kv_heads=1, k_dim=16, v_dim=8, dtype="bfloat16")
LAYOUT = KVLayout((_FULL, _MORE), chunk_tokens=CHUNK_TOKENS, section_layers=1)
NAMESPACE = Namespace("weights", LAYOUT)


@dataclass(frozen=True)
class _Section:
    """Where a section lies in the arena, and what belongs there."""

    start: int
    right: bytes


class PatternEngine:
    """Stores and loads through a cache, in one thread. ``load`` raises on a wrong byte."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._codec = RawCodec()

    def match(self, tokens: Sequence[int]) -> Ready:
        """Look up a prefix, waiting while the disk is being opened."""
        sequence = self._cache.sequence(NAMESPACE)
        sequence.append(list(tokens))
        wait_until(lambda: not isinstance(self._cache.match(sequence), Pending), "no disk opens")
        match = self._cache.match(sequence)
        assert isinstance(match, Ready)
        return match

    def store(self, tokens: Sequence[int]) -> None:
        """Store what the cache takes of a sequence's chunks."""
        sequence = self._cache.sequence(NAMESPACE)
        sequence.append(list(tokens))
        chunks = range(len(sequence.chunk_keys))
        plan = self._cache.begin_store(sequence, chunks, self._blocks(len(tokens)))
        if plan is None:
            return
        for section in self._sections(plan, sequence.chunk_keys):
            end = section.start + len(section.right)
            self._cache.arena[section.start : end] = section.right
        self._cache.finish([Result(plan.plan_id, 0, ok=True)])

    def load(self, match: Ready) -> int:
        """Load all of a match, hold every byte against the pattern, return the tokens."""
        load = self._cache.begin_load(match, self._blocks(match.tokens))
        if load is None:
            return 0

        def over() -> bool:
            for plan in load.poll():
                for section in self._sections(plan, match.sequence.chunk_keys):
                    found = self._cache.arena[section.start : section.start + len(section.right)]
                    assert found == section.right, "wrong bytes served"
                self._cache.finish([Result(plan.plan_id, 0, ok=True)])
            return load.outcome is not None

        wait_until(over, "a load does not end")
        assert load.outcome is not None
        return load.outcome.end_token

    def _blocks(self, token_count: int) -> Blocks:
        ids = tuple(range(-(-token_count // BLOCK_TOKENS)))
        return Blocks(0, (ids,) * SHARDS, BLOCK_TOKENS)

    def _sections(self, plan: Plan, keys: Sequence[ChunkKey]) -> Iterator[_Section]:
        for move in plan.moves:
            key = keys[move.position_start // CHUNK_TOKENS]
            for section in range(move.first_section, move.first_section + move.section_count):
                yield self._section(move, key, section)

    def _section(self, move: Move, key: ChunkKey, section: int) -> _Section:
        nbytes = self._codec.section_bytes(move.layout, section)
        start = move.slot.offset + move.payload_offset
        start += section_offset(self._codec, move.layout, section)
        text = key + bytes(move.shard) + bytes([section])
        right = bytearray(hashlib.shake_128(text).digest(nbytes))
        # Exponents as alike as those of KV, for what encodes them.
        width = DTYPE_BYTES[move.layout.dtype]
        right[width - 1 :: width] = b"\x3f" * (nbytes // width)
        return _Section(start, bytes(right))
