"""Many moves at once, either way across the link, against the codecs' own pack and unpack.

Without a GPU, kernels run in Triton's interpreter, and queues do at once what they are given.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtier.codecs import gpu
from kvtier.codecs.gpu import Shipment, StripedCodec, batches
from kvtier.errors import CodecError, LayoutError
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Direction, GroupKind, HeadSlice, KVGroup, Move, Part, ShardLayout
from tests.lib.host_queues import (
    CODECS,
    DEVICE,
    made_codec,
    made_mark,
    made_move,
    made_mover,
    shipments,
)

from kvtier_kernels.transfer.lane import Way  # isort: skip

DIRECT, STAGED = Way(direct=True, programs=3), Way(direct=False, programs=2)
WAYS = pytest.mark.parametrize("way", [DIRECT, STAGED], ids=["direct", "staged"])
#: Three layers in sections of two: the last section is smaller.
LAYOUT = ShardLayout(3, 2, 64, 64, "bfloat16", 16, section_layers=2)
BLOCK_TOKENS = 4
CHUNKS = ((7, 2, 19, 3), (11, 0, 23, 14), (5, 16, 9, 21))


def pool_for(
    layout: ShardLayout,
    arrangement: Arrangement = Arrangement.HEAD_MAJOR,
    *,
    heads: int | None = None,
    device: str = DEVICE,
) -> TorchPool:
    kind = GroupKind.FULL if layout.v_dim else GroupKind.LATENT
    layers = tuple(range(layout.layers))
    kv_heads = heads or layout.kv_heads
    group = KVGroup(kind, layers, kv_heads, layout.k_dim, layout.v_dim, layout.dtype)
    return TorchPool(
        [group],
        block_count=24,
        block_tokens=BLOCK_TOKENS,
        arrangement=arrangement,
        device=device,
    )


def layout_for(codec: str, layout: ShardLayout, *, first: bool) -> ShardLayout:
    """The layout of a sequence's first chunk, or of another one."""
    sinks = made_codec(codec, layout).traits.sink_tokens if first else 0
    return replace(layout, sink_tokens=sinks)


def check(
    codec: StripedCodec,
    moves: list[Move],
    way: Way,
    arrangement: Arrangement = Arrangement.HEAD_MAJOR,
    *,
    heads: int | None = None,
    reached: bool = True,
) -> None:
    """Slots and pools end up as the codec's own pack and unpack leave them on a CPU."""
    made = [pool_for(moves[0].layout, arrangement, heads=heads, device=d) for d in ("cpu", DEVICE)]
    reference, pool = made
    for one in made:
        one.fill_bytes(3) if codec.name == "raw" else one.fill_values(3)
    mover = made_mover(pool, way, reached=reached)
    expected, found = shipments(codec, moves), shipments(codec, moves, pageable=not reached)
    for shipment in expected:
        codec.pack(reference, shipment.move, shipment.payload)
    mover.move(Direction.STORE, batches(found), made_mark())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.payload == theirs.payload
    for one in made:
        one.poison()
    for shipment in expected:
        codec.unpack(shipment.payload, reference, shipment.move)
    mover.move(Direction.LOAD, batches(found), made_mark())
    assert pool.snapshot() == reference.snapshot()


@pytest.mark.parametrize(
    ("codec", "way"),
    # The interpreter takes its time for lossless.
    [(codec, way) for codec in CODECS for way in (DIRECT, STAGED)[codec == "lossless" :]],
)
def test_three_chunks_at_once(codec: str, way: Way) -> None:
    """The first one has sink tokens, if the codec keeps any."""
    made = made_codec(codec, LAYOUT)
    moves = [
        made_move(made, layout_for(codec, LAYOUT, first=nth == 0), blocks, position=16 * nth)
        for nth, blocks in enumerate(CHUNKS)
    ]
    check(made, moves, way)


@WAYS
@pytest.mark.parametrize("arrangement", Arrangement)
def test_b16_every_arrangement_of_the_pool(arrangement: Arrangement, way: Way) -> None:
    made = made_codec("raw", LAYOUT)
    moves = [made_move(made, LAYOUT, blocks) for blocks in CHUNKS]
    check(made, moves, way, arrangement)


class StackedPool:
    """All layers in one allocation; a row holds a token's K and V of one head, as in vLLM.

    ``order`` names the dimensions before the row: layers, blocks, heads and tokens (N).
    """

    block_tokens = BLOCK_TOKENS
    block_count = 24
    stream = 0

    def __init__(self, order: str, device: str) -> None:
        sizes = {"L": LAYOUT.layers, "B": 24, "H": LAYOUT.kv_heads, "N": BLOCK_TOKENS}
        shape = [sizes[axis] for axis in order]
        self.memory = torch.zeros(*shape, 128, dtype=torch.bfloat16, device=device)
        self._layers = self.memory.permute(*(order.index(axis) for axis in "LBNH"), 4)

    def layer_view(self, group: int, layer: int, part: Part) -> torch.Tensor:
        assert group == 0
        return self._layers[layer][..., 64 * part : 64 * (part + 1)]


@pytest.mark.parametrize("order", ["LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN"])
def test_b16_every_physical_order_of_vllm(order: str) -> None:
    """What one order's pool gives, another's takes: the packed form knows no order."""
    made = made_codec("int8", LAYOUT)
    source, target = StackedPool(order, DEVICE), StackedPool("LBNH", DEVICE)
    values = torch.randn(source.memory.shape, generator=torch.Generator().manual_seed(11))
    source.memory.copy_(values)
    found = shipments(made, [made_move(made, LAYOUT, blocks) for blocks in CHUNKS])
    made_mover(source, DIRECT).move(Direction.STORE, [found], made_mark())
    reference = StackedPool(order, "cpu")
    reference.memory.copy_(values)
    for shipment in shipments(made, [shipment.move for shipment in found]):
        made.pack(reference, shipment.move, shipment.payload)
        made.unpack(shipment.payload, reference, shipment.move)
    made_mover(target, DIRECT).move(Direction.LOAD, [found], made_mark())
    for layer in range(LAYOUT.layers):
        for part in Part:
            views = [pool.layer_view(0, layer, part).cpu() for pool in (reference, target)]
            for blocks in CHUNKS:
                assert torch.equal(views[0][list(blocks)], views[1][list(blocks)])


@pytest.mark.parametrize("codec", ["raw", "int5k4v", "int4", "fp8"])
@pytest.mark.parametrize("rows", [(0, 16), (3, 9), (15, 1)], ids=str)
def test_b16_some_rows_and_heads(codec: str, rows: tuple[int, int]) -> None:
    """Bytes of rows that do not move stay poison, in slots and in the pool."""
    made, layout = made_codec(codec, LAYOUT), layout_for(codec, LAYOUT, first=True)
    first = rows[0] // BLOCK_TOKENS
    last = (sum(rows) - 1) // BLOCK_TOKENS
    moves = [
        made_move(made, layout, blocks[first : last + 1], rows=rows, heads=HeadSlice(1, 2, 1))
        for blocks in CHUNKS
    ]
    check(made, moves, STAGED, Arrangement.TOKEN_MAJOR, heads=3)


def test_b16_some_rows_in_memory_that_kernels_do_not_reach() -> None:
    made = made_codec("int8", LAYOUT)
    moves = [made_move(made, LAYOUT, blocks[:2], rows=(1, 6)) for blocks in CHUNKS]
    check(made, moves, DIRECT, reached=False)


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_whole_chunks_in_memory_that_kernels_do_not_reach(codec: str) -> None:
    """Page-locking was refused: a buffer on the device and plain copies."""
    made, layout = made_codec(codec, LAYOUT), layout_for(codec, LAYOUT, first=True)
    check(made, [made_move(made, layout, blocks) for blocks in CHUNKS], DIRECT, reached=False)


@pytest.mark.parametrize("codec", ["int8", "int6", "int5k4v"])
def test_latent_rows_and_other_sections_than_all(codec: str) -> None:
    layout = ShardLayout(3, 1, 72, 0, "float16", 16, section_layers=1)
    made = made_codec(codec, layout)
    moves = [made_move(made, layout, blocks, sections=range(1, 3)) for blocks in CHUNKS]
    check(made, moves, STAGED)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("codec", ["raw", "fp8", "lossless"])
def test_other_dtypes(codec: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype, k_dim=20, v_dim=12)
    made = made_codec(codec, layout)
    moves = [made_move(made, layout, blocks) for blocks in CHUNKS]
    check(made, moves, DIRECT)


def test_kinds_move_apart_and_batches_are_bounded() -> None:
    made = made_codec("raw", LAYOUT)
    whole = made_move(made, LAYOUT, CHUNKS[0])
    part = made_move(made, LAYOUT, CHUNKS[1][:1], rows=(0, 3))
    mixed = [Shipment(made, move, memoryview(b"")) for move in (whole, part, *[whole] * 256)]
    assert [len(batch) for batch in batches(mixed)] == [256, 1, 1]


def test_batches_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BATCH_BYTES_MAX", 100)
    made = made_codec("raw", LAYOUT)
    whole = made_move(made, LAYOUT, CHUNKS[0])
    sizes = (40, 60, 1, 300, 50, 50)
    moved = [Shipment(made, whole, memoryview(bytes(size))) for size in sizes]
    assert [len(batch) for batch in batches(moved)] == [2, 1, 1, 2]


def test_b16_what_does_not_fit_is_refused_before_a_byte_is_written() -> None:
    pool = pool_for(LAYOUT)
    made = made_codec("raw", LAYOUT)
    mover = made_mover(pool, DIRECT)
    good = made_move(made, LAYOUT, CHUNKS[0])
    before = pool.snapshot()
    for changes, message in (
        ({"block_ids": (7, 2, 19, 24)}, "outside 0 .. 23"),
        ({"block_ids": (7, 2, 19, -1)}, "outside 0 .. 23"),
        ({"block_ids": (7, 2, 19, 7)}, "named twice"),
        ({"block_ids": (7, 2, 19)}, "4 blocks, not 3"),
        ({"section_count": 3}, "2 sections"),
        ({"heads": HeadSlice(0, 1, 2)}, "the pool has 2 heads"),
    ):
        bad = replace(good, **changes)
        with pytest.raises(LayoutError, match=message):
            mover.move(Direction.LOAD, [shipments(made, [bad])], None)
    (short,) = shipments(made, [good])
    with pytest.raises(LayoutError, match="shorter than"):
        mover.move(Direction.LOAD, [[replace(short, payload=short.payload[:-1])]], None)
    twice = shipments(made, [good, made_move(made, LAYOUT, CHUNKS[0])])
    with pytest.raises(LayoutError, match="named twice"):
        mover.move(Direction.LOAD, [twice], None)
    assert pool.snapshot() == before


@WAYS
def test_values_that_cannot_be_packed_fail_the_batch(way: Way) -> None:
    pool = pool_for(LAYOUT)
    pool.fill_values(9)
    made = made_codec("int8", LAYOUT)
    mover = made_mover(pool, way)
    moves = [made_move(made, LAYOUT, blocks) for blocks in CHUNKS]
    pool.layer_view(0, 2, Part.V)[CHUNKS[2][3], 1, 1, 5] = float("nan")
    with pytest.raises(CodecError, match="int8 cannot pack"):
        mover.move(Direction.STORE, [shipments(made, moves)], made_mark())
