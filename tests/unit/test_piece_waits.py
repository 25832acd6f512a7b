"""What of a load lies in DRAM and waits: all of a chunk or nothing, and it is looked at once."""

from __future__ import annotations

from unittest import mock

from kvtier.cache.below.fill import Fill
from kvtier.cache.pieces import Piece
from kvtier.tiers.dram import DramRecord
from kvtier.types import ChunkKey, Entry, ShardId

KEY, SHARD, NBYTES = ChunkKey(bytes(32)), ShardId(0, 0, 0), 4096


class Verified(dict[ShardId, int]):
    """Counts how often anybody looks."""

    looks = 0

    def __getitem__(self, shard: ShardId) -> int:
        self.looks += 1
        return super().__getitem__(shard)


def hold(piece: Piece, verified: Verified) -> None:
    """Have a fill bring the piece, of two sections."""
    piece.record = DramRecord(Entry(KEY, None, NBYTES, 0), b"", "raw", {})
    piece.sections = {SHARD: 2}
    piece.fill = mock.Mock(spec=Fill, verified=verified)


def test_what_has_come_is_not_looked_at_again() -> None:
    """Each fill that ends looks at all that waits, of every load and under the lock."""
    piece, verified = Piece(0, KEY, range(8), frozenset({0})), Verified({SHARD: 1})
    assert piece.waiting_bytes == 0
    hold(piece, verified)
    assert piece.waiting_bytes == 0, "a section is lacking"
    verified[SHARD] = 2
    verified.looks = 0
    assert [piece.waiting_bytes for _ in range(100)] == [NBYTES] * 100
    assert verified.looks == 1


def test_a_piece_that_begins_anew_has_not_come() -> None:
    piece = Piece(0, KEY, range(8), frozenset({0}))
    hold(piece, Verified({SHARD: 2}))
    assert piece.waiting_bytes == NBYTES
    piece.forget_fill()
    assert piece.waiting_bytes == 0
    hold(piece, Verified({SHARD: 1}))
    assert piece.waiting_bytes == 0, "what came was another fill's"
