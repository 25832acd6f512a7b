"""What every block codec must do. Subclass in a test module and supply ``make_codec``::

class TestMyCodec(BlockCodecContract):
    relative_error_max = 0.02

    def make_codec(self) -> BlockCodec:
        return MyCodec()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from kvtier.codecs.sections import section_offset
from kvtier.errors import LayoutError
from kvtier.interfaces import BlockCodec
from kvtier.testing.pools import POISON, Arrangement, TorchPool
from kvtier.types import (
    DTYPE_BYTES,
    GroupKind,
    HeadSlice,
    KVGroup,
    Move,
    Part,
    ShardId,
    ShardLayout,
    Slot,
)

if TYPE_CHECKING:
    import torch

BLOCK_COUNT: Final = 24
SCATTERED: Final = (7, 2, 19, 3, 11, 0, 23, 14, 5, 16, 9, 21)
CONSECUTIVE: Final = tuple(range(8, 20))
GUARD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A shard and the pool blocks that hold its chunk."""

    layout: ShardLayout
    block_tokens: int = 4

    def pool(
        self,
        arrangement: Arrangement = Arrangement.HEAD_MAJOR,
        *,
        kv_heads: int | None = None,
        spare_layers: int = 0,
        device: str = "cpu",
    ) -> TorchPool:
        """A poisoned pool that can hold the shard, with the shard's heads unless said."""
        layout = self.layout
        group = KVGroup(
            kind=GroupKind.FULL if layout.v_dim else GroupKind.LATENT,
            layers=tuple(range(layout.layers + spare_layers)),
            kv_heads=layout.kv_heads if kv_heads is None else kv_heads,
            k_dim=layout.k_dim,
            v_dim=layout.v_dim,
            dtype=layout.dtype,
        )
        return TorchPool(
            [group],
            block_count=BLOCK_COUNT,
            block_tokens=self.block_tokens,
            arrangement=arrangement,
            device=device,
        )

    def move(self, blocks: Sequence[int] = SCATTERED) -> Move:
        """The move of the whole shard; ``blocks`` are cut to what it needs."""
        layout = self.layout
        return Move(
            worker=0,
            codec="under test",
            shard=ShardId(0, 0, 0),
            layout=layout,
            slot=Slot(0, 0),
            payload_offset=0,
            first_section=0,
            section_count=layout.sections,
            heads=HeadSlice(0, 0, layout.kv_heads),
            pool_layer_start=0,
            token_start=0,
            token_count=layout.tokens,
            block_ids=tuple(blocks[: -(-layout.tokens // self.block_tokens)]),
        )

    def rows(self, move: Move, start: int, count: int) -> Move:
        """``move`` cut to the chunk's tokens ``start .. start + count``."""
        first, last = start // self.block_tokens, (start + count - 1) // self.block_tokens
        blocks = move.block_ids[first : last + 1]
        return replace(move, token_start=start, token_count=count, block_ids=blocks)


PLAIN: Final = Shape(
    ShardLayout(
        layers=6, kv_heads=4, k_dim=8, v_dim=12, dtype="float32", tokens=24, section_layers=4
    )
)
ODD: Final = (
    Shape(ShardLayout(2, 1, 3, 3, "bfloat16", 4), block_tokens=4),
    Shape(ShardLayout(2, 1, 3, 3, "float8_e4m3fn", 4), block_tokens=4),
    Shape(ShardLayout(3, 2, 5, 7, "float16", 9, section_layers=2), block_tokens=3),
    Shape(ShardLayout(2, 1, 9, 0, "float32", 8), block_tokens=4),
    Shape(ShardLayout(1, 3, 1, 1, "uint8", 11), block_tokens=1),
    Shape(ShardLayout(5, 1, 16, 8, "float8_e5m2", 10, section_layers=1), block_tokens=4),
)


class BlockCodecContract(ABC):
    """Tests of the ``BlockCodec`` protocol.

    ``relative_error_max`` is the largest error of a value over the largest magnitude of its
    plane; 0 asks for the same bytes, whatever they mean. ``dtypes`` are those that the codec
    takes, ``device`` is where the pools lie.
    """

    relative_error_max: ClassVar[float] = 0.0
    dtypes: ClassVar[Sequence[str]] = tuple(DTYPE_BYTES)
    device: ClassVar[str] = "cpu"

    @abstractmethod
    def make_codec(self) -> BlockCodec:
        """Return the codec under test."""

    def filled_pool(self, shape: Shape, arrangement: Arrangement, seed: int = 1) -> TorchPool:
        """A pool with content: any bytes for an exact codec, values for a lossy one."""
        pool = shape.pool(arrangement, device=self.device)
        if self.relative_error_max == 0.0:
            pool.fill_bytes(seed)
        else:
            pool.fill_values(seed)
        return pool

    def payload(self, shape: Shape) -> bytearray:
        """A poisoned payload for the shard, and a guard behind it."""
        nbytes = section_offset(self.make_codec(), shape.layout, shape.layout.sections)
        return bytearray([POISON]) * (nbytes + GUARD_BYTES)

    def packed(self, pool: TorchPool, *moves: Move) -> bytearray:
        """A poisoned payload into which the moves were packed."""
        payload = self.payload(Shape(moves[0].layout, pool.block_tokens))
        for move in moves:
            self.make_codec().pack(pool, move, memoryview(payload))
        return payload

    def assert_same(self, stored: torch.Tensor, restored: torch.Tensor) -> None:
        """Compare planes by the codec's own promise."""
        import torch

        if self.relative_error_max == 0.0:
            stored_bytes, restored_bytes = (
                rows.contiguous().view(torch.uint8) for rows in (stored, restored)
            )
            assert torch.equal(stored_bytes, restored_bytes)
            return
        error = (stored.float() - restored.float()).abs().max()
        assert error <= self.relative_error_max * stored.float().abs().max()

    def assert_restored(
        self, shape: Shape, source: TorchPool, sources: Move, target: TorchPool, targets: Move
    ) -> None:
        """Require that a whole shard came from one pool's blocks into the other's."""
        tokens = shape.layout.tokens
        for layer in range(shape.layout.layers):
            for part in Part if shape.layout.v_dim else (Part.K,):
                stored = source.rows(0, layer, part, sources.block_ids)[:tokens]
                restored = target.rows(0, layer, part, targets.block_ids)[:tokens]
                self.assert_same(stored, restored)

    def round_trip(self, shape: Shape, source_as: Arrangement, target_as: Arrangement) -> None:
        """Pack from scattered blocks, unpack into others of another pool, compare both."""
        source, target = (
            self.filled_pool(shape, source_as),
            shape.pool(target_as, device=self.device),
        )
        sources, targets = shape.move(SCATTERED), shape.move(CONSECUTIVE)
        payload = self.packed(source, sources)
        self.make_codec().unpack(memoryview(payload), target, targets)
        self.assert_restored(shape, source, sources, target, targets)
        back = self.packed(target, targets)
        if self.relative_error_max == 0.0:
            assert back == payload

    def test_is_a_codec(self) -> None:
        """The type has every method, a name, and sections of some size."""
        codec = self.make_codec()
        assert isinstance(codec, BlockCodec)
        assert codec.name
        sizes = [codec.section_bytes(PLAIN.layout, section) for section in range(2)]
        assert sizes[0] > sizes[1] > 0

    @pytest.mark.parametrize("arrangement", tuple(Arrangement))
    def test_round_trip(self, arrangement: Arrangement) -> None:
        """What was stored comes back, from any layout into another, in every dtype it takes."""
        for dtype in self.dtypes:
            shape = Shape(replace(PLAIN.layout, dtype=dtype))
            self.round_trip(shape, arrangement, Arrangement.HEAD_MAJOR)
            self.round_trip(shape, Arrangement.PACKED, arrangement)

    @pytest.mark.parametrize("shape", ODD, ids=str)
    @pytest.mark.parametrize("arrangement", tuple(Arrangement))
    def test_b16_odd_shapes_round_trip(self, shape: Shape, arrangement: Arrangement) -> None:
        """Odd dims, K and V of different dims, latent groups, one token per block, part blocks.

        In the shape's dtype, or in one that the codec takes.
        """
        dtype = shape.layout.dtype if shape.layout.dtype in self.dtypes else self.dtypes[-1]
        taken = replace(shape, layout=replace(shape.layout, dtype=dtype))
        self.round_trip(taken, arrangement, arrangement)

    def test_pack_stays_within_its_sections(self) -> None:
        """Sections start at multiples of 4096; of other sections no byte is written.

        What lies behind one, before the next, becomes zero, whatever chunk the slot held before.
        """
        codec = self.make_codec()
        pool = self.filled_pool(PLAIN, Arrangement.HEAD_MAJOR)
        move = replace(PLAIN.move(), first_section=1, section_count=1)
        payload = self.packed(pool, move)
        start = 4096 * -(-codec.section_bytes(PLAIN.layout, 0) // 4096)
        end = start + codec.section_bytes(PLAIN.layout, 1)
        behind = 4096 * -(-end // 4096)
        assert payload[:start] == bytes([POISON]) * start
        assert payload[end:behind] == bytes(behind - end)
        assert payload[behind:] == bytes([POISON]) * (len(payload) - behind)
        assert payload[start:end] == self.packed(pool, PLAIN.move())[start:end]

    @pytest.mark.parametrize("split", [1, 4, 7, 16, 23])
    def test_rows_packed_in_two_moves_make_a_whole(self, split: int) -> None:
        """A move of some tokens writes their rows only, whatever is there already."""
        pool = self.filled_pool(PLAIN, Arrangement.TOKEN_MAJOR)
        whole = PLAIN.move()
        parts = (PLAIN.rows(whole, split, 24 - split), PLAIN.rows(whole, 0, split))
        assert self.packed(pool, *parts) == self.packed(pool, whole)

    @pytest.mark.parametrize("split", [1, 3])
    def test_heads_packed_in_two_moves_make_a_whole(self, split: int) -> None:
        """A move of some heads writes their planes only."""
        pool = self.filled_pool(PLAIN, Arrangement.BLOCK_MAJOR)
        whole = PLAIN.move()
        parts = (
            replace(whole, heads=HeadSlice(split, split, 4 - split)),
            replace(whole, heads=HeadSlice(0, 0, split)),
        )
        assert self.packed(pool, *parts) == self.packed(pool, whole)

    @pytest.mark.parametrize(("start", "count"), [(0, 5), (3, 1), (4, 8), (5, 10), (23, 1)])
    @pytest.mark.parametrize("arrangement", tuple(Arrangement))
    def test_unpack_writes_its_rows_and_nothing_else(
        self, arrangement: Arrangement, start: int, count: int
    ) -> None:
        """Tokens before and after the range keep their bytes, in the same blocks too."""
        import torch

        source, target = (
            self.filled_pool(PLAIN, arrangement),
            PLAIN.pool(arrangement, device=self.device),
        )
        payload, whole = self.packed(source, PLAIN.move()), PLAIN.move()
        self.make_codec().unpack(memoryview(payload), target, PLAIN.rows(whole, start, count))
        rows = slice(start, start + count)
        for layer in range(PLAIN.layout.layers):
            for part in Part:
                stored = source.rows(0, layer, part, whole.block_ids)[rows]
                self.assert_same(stored, target.rows(0, layer, part, whole.block_ids)[rows])
                view = target.layer_view(0, layer, part).view(torch.uint8)
                for token in range(start, start + count):
                    view[whole.block_ids[token // 4], token % 4] = POISON
        assert set(target.snapshot()) == {POISON}

    def test_unpack_writes_its_heads_and_nothing_else(self) -> None:
        """A reader of another tensor-parallel degree takes its heads from a bigger shard."""
        source = self.filled_pool(PLAIN, Arrangement.HEAD_MAJOR)
        target = PLAIN.pool(Arrangement.TOKEN_MAJOR, kv_heads=3, device=self.device)
        payload, move = self.packed(source, PLAIN.move()), PLAIN.move(CONSECUTIVE)
        move = replace(move, heads=HeadSlice(shard_start=1, pool_start=0, count=2))
        self.make_codec().unpack(memoryview(payload), target, move)
        for layer in range(PLAIN.layout.layers):
            for part in Part:
                stored = source.rows(0, layer, part, PLAIN.move().block_ids)[:, 1:3]
                view = target.layer_view(0, layer, part)
                restored = target.rows(0, layer, part, move.block_ids)
                self.assert_same(stored, restored[:, :2])
                view[CONSECUTIVE[0] : CONSECUTIVE[5] + 1, :, :2] = view[0, 0, 0, 0]
        assert set(target.snapshot()) == {POISON}

    def test_unpack_writes_its_sections_and_nothing_else(self) -> None:
        """Only the layers of the move's sections change, at the pool's own layer numbers."""
        source = self.filled_pool(PLAIN, Arrangement.HEAD_MAJOR)
        target = PLAIN.pool(spare_layers=3, device=self.device)
        payload = self.packed(source, PLAIN.move())
        move = replace(PLAIN.move(), first_section=1, section_count=1, pool_layer_start=2)
        self.make_codec().unpack(memoryview(payload), target, move)
        for layer in (4, 5):
            for part in Part:
                stored = source.rows(0, layer, part, move.block_ids)
                self.assert_same(stored, target.rows(0, layer + 2, part, move.block_ids))
                view = target.layer_view(0, layer + 2, part)
                view[:] = target.layer_view(0, 0, part)
        assert set(target.snapshot()) == {POISON}

    def test_unpack_from_a_read_only_payload(self) -> None:
        """A payload that was mapped read-only loads as well."""
        source, target = (
            self.filled_pool(PLAIN, Arrangement.HEAD_MAJOR),
            PLAIN.pool(device=self.device),
        )
        payload = bytes(self.packed(source, PLAIN.move()))
        self.make_codec().unpack(memoryview(payload).toreadonly(), target, PLAIN.move())
        self.assert_restored(PLAIN, source, PLAIN.move(), target, PLAIN.move())

    @pytest.mark.parametrize(
        "changes",
        [
            {"layout": replace(PLAIN.layout, dtype="bfloat16")},
            {"layout": replace(PLAIN.layout, k_dim=4)},
            {"layout": replace(PLAIN.layout, v_dim=16)},
            {"heads": HeadSlice(0, 1, 4)},
            {"heads": HeadSlice(1, 0, 4)},
            {"heads": HeadSlice(0, -1, 2)},
            {"token_start": 1},
            {"token_count": 0},
            {"token_count": 20},
            {"block_ids": SCATTERED[:5]},
            {"block_ids": (*SCATTERED[:5], BLOCK_COUNT)},
            {"block_ids": (*SCATTERED[:5], -1)},
            {"first_section": 2},
            {"section_count": 3},
        ],
        ids=str,
    )
    def test_a_move_that_does_not_fit_is_refused(self, changes: dict[str, object]) -> None:
        """Both ways raise ``LayoutError``; pool and payload keep their bytes."""
        codec, pool = self.make_codec(), PLAIN.pool(device=self.device)
        move = replace(PLAIN.move(), **changes)  # type: ignore[arg-type]
        payload = bytearray(section_offset(codec, PLAIN.layout, 2) * 2)
        with pytest.raises(LayoutError):
            codec.pack(pool, move, memoryview(payload))
        with pytest.raises(LayoutError):
            codec.unpack(memoryview(payload), pool, move)
        assert set(pool.snapshot()) == {POISON}
        assert not any(payload)

    def test_a_payload_too_small_is_refused(self) -> None:
        """A payload that ends within a section is a ``LayoutError`` both ways."""
        codec, pool = self.make_codec(), PLAIN.pool(device=self.device)
        move = replace(PLAIN.move(), section_count=1)
        payload = bytearray(codec.section_bytes(PLAIN.layout, 0) - 1)
        with pytest.raises(LayoutError):
            codec.pack(pool, move, memoryview(payload))
        with pytest.raises(LayoutError):
            codec.unpack(memoryview(payload), pool, move)
        assert set(pool.snapshot()) == {POISON}
