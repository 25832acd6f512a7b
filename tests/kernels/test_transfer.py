"""Many moves at once, either way across the link, against the codecs' own pack and unpack.

Without a GPU, kernels run in Triton's interpreter, and queues do at once what they are given.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.codecs.gpu import GpuMover, Shipment, StripedCodec, batches
from kvtier.errors import CodecError, LayoutError
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Direction, GroupKind, HeadSlice, KVGroup, Move, Part, ShardLayout
from tests.lib.host_queues import CODECS, host_mover, made_codec, made_move, shipments

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
) -> TorchPool:
    kind = GroupKind.FULL if layout.v_dim else GroupKind.LATENT
    layers = tuple(range(layout.layers))
    kv_heads = heads or layout.kv_heads
    group = KVGroup(kind, layers, kv_heads, layout.k_dim, layout.v_dim, layout.dtype)
    return TorchPool([group], block_count=24, block_tokens=BLOCK_TOKENS, arrangement=arrangement)


def layout_for(codec: str, layout: ShardLayout, *, first: bool) -> ShardLayout:
    """The layout of a sequence's first chunk, or of another one."""
    sinks = made_codec(codec, layout).traits.sink_tokens if first else 0
    return replace(layout, sink_tokens=sinks)


def check(codec: StripedCodec, pool: TorchPool, mover: GpuMover, moves: list[Move]) -> None:
    """Slots and pools end up as the codec's own pack and unpack leave them."""
    expected, found = shipments(codec, moves), shipments(codec, moves)
    for shipment in expected:
        codec.pack(pool, shipment.move, shipment.payload)
    for batch in batches(found):
        mover.move(Direction.STORE, batch, None)
    for one, other in zip(expected, found, strict=True):
        assert one.payload == other.payload
    pool.poison()
    for shipment in expected:
        codec.unpack(shipment.payload, pool, shipment.move)
    unpacked = pool.snapshot()
    pool.poison()
    for batch in batches(found):
        mover.move(Direction.LOAD, batch, None)
    assert pool.snapshot() == unpacked


@WAYS
@pytest.mark.parametrize("codec", CODECS)
def test_three_chunks_at_once(codec: str, way: Way) -> None:
    """The first one has sink tokens, if the codec keeps any."""
    pool = pool_for(LAYOUT)
    pool.fill_values(1)
    made = made_codec(codec, LAYOUT)
    moves = [
        made_move(made, layout_for(codec, LAYOUT, first=nth == 0), blocks, position=16 * nth)
        for nth, blocks in enumerate(CHUNKS)
    ]
    check(made, pool, host_mover(pool, way), moves)


@WAYS
@pytest.mark.parametrize("arrangement", Arrangement)
def test_b16_every_arrangement_of_the_pool(arrangement: Arrangement, way: Way) -> None:
    pool = pool_for(LAYOUT, arrangement)
    pool.fill_bytes(2)
    made = made_codec("raw", LAYOUT)
    moves = [made_move(made, LAYOUT, blocks) for blocks in CHUNKS]
    check(made, pool, host_mover(pool, way), moves)


@pytest.mark.parametrize("codec", ["raw", "int5k4v", "int4", "fp8"])
@pytest.mark.parametrize("rows", [(0, 16), (3, 9), (15, 1)], ids=str)
def test_b16_some_rows_and_heads(codec: str, rows: tuple[int, int]) -> None:
    """Bytes of rows that do not move stay poison, in slots and in the pool."""
    pool = pool_for(LAYOUT, Arrangement.TOKEN_MAJOR, heads=3)
    pool.fill_values(3)
    made, layout = made_codec(codec, LAYOUT), layout_for(codec, LAYOUT, first=True)
    first = rows[0] // BLOCK_TOKENS
    last = (sum(rows) - 1) // BLOCK_TOKENS
    moves = [
        made_move(made, layout, blocks[first : last + 1], rows=rows, heads=HeadSlice(1, 2, 1))
        for blocks in CHUNKS
    ]
    check(made, pool, host_mover(pool, STAGED), moves)


def test_b16_some_rows_in_memory_that_kernels_do_not_reach() -> None:
    pool = pool_for(LAYOUT)
    pool.fill_values(4)
    made = made_codec("int8", LAYOUT)
    moves = [made_move(made, LAYOUT, blocks[:2], rows=(1, 6)) for blocks in CHUNKS]
    log: list[str] = []
    check(made, pool, host_mover(pool, DIRECT, reached=False, log=log), moves)
    # The store goes through the host; loads are staged.
    assert "store copies" not in log
    assert "load copies" in log


@pytest.mark.parametrize("codec", ["int8", "int6", "int5k4v"])
def test_latent_rows_and_other_sections_than_all(codec: str) -> None:
    layout = ShardLayout(3, 1, 72, 0, "float16", 16, section_layers=1)
    pool = pool_for(layout)
    pool.fill_values(5)
    made = made_codec(codec, layout)
    moves = [made_move(made, layout, blocks, sections=range(1, 3)) for blocks in CHUNKS]
    check(made, pool, host_mover(pool, STAGED), moves)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("codec", ["raw", "fp8", "lossless"])
def test_other_dtypes(codec: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype, k_dim=20, v_dim=12)
    pool = pool_for(layout)
    pool.fill_values(6)
    made = made_codec(codec, layout)
    moves = [made_move(made, layout, blocks) for blocks in CHUNKS]
    check(made, pool, host_mover(pool, DIRECT), moves)


def test_kinds_move_apart_and_batches_are_bounded() -> None:
    made = made_codec("raw", LAYOUT)
    whole = made_move(made, LAYOUT, CHUNKS[0])
    part = made_move(made, LAYOUT, CHUNKS[1][:1], rows=(0, 3))
    mixed = [Shipment(made, move, memoryview(b"")) for move in (whole, part, *[whole] * 64)]
    assert [len(batch) for batch in batches(mixed)] == [64, 1, 1]


def test_b01_nothing_starts_before_the_mark_and_all_ends_before_the_return() -> None:
    pool = pool_for(LAYOUT)
    pool.fill_values(7)
    made = made_codec("raw", LAYOUT)
    for way in (DIRECT, STAGED):
        for direction in Direction:
            log: list[str] = []
            mover = host_mover(pool, way, log=log)
            mover.move(direction, shipments(made, [made_move(made, LAYOUT, CHUNKS[0])]), "mark")
            waits = [f"{direction} {queue} wait for mark" for queue in ("kernels", "copies")]
            assert log[:2] == waits
            ended = log.index(f"{direction} finish")
            assert all(line == f"{direction} kernels" for line in log[ended + 1 :])


def test_a_buffer_is_free_again_before_it_is_filled_again() -> None:
    """Of three slices, the third waits for what the first one's last user was given."""
    layout = replace(LAYOUT, section_layers=1)
    pool = pool_for(layout)
    pool.fill_values(8)
    before = pool.rows(0, 2, Part.V, CHUNKS[0])
    made = made_codec("raw", layout)
    log: list[str] = []
    mover = host_mover(pool, STAGED, log=log, staging_bytes=made.section_bytes(layout, 0))
    (shipment,) = shipments(made, [made_move(made, layout, CHUNKS[0])])
    mover.move(Direction.STORE, [shipment], None)
    pool.poison()
    mover.move(Direction.LOAD, [shipment], None)
    assert pool.rows(0, 2, Part.V, CHUNKS[0]).equal(before)
    for first, second in (("store kernels", "store copies"), ("load copies", "load kernels")):
        freed = [line for line in log if line.startswith(f"{second} mark")]
        assert len(freed) == 3
        waits = [line for line in log if line.startswith(f"{first} wait for mark")]
        assert waits == [f"{first} wait for {freed[0].removeprefix(f'{second} ')}"]


@WAYS
def test_values_that_cannot_be_packed_fail_the_batch_when_it_has_ended(way: Way) -> None:
    pool = pool_for(LAYOUT)
    pool.fill_values(9)
    made = made_codec("int8", LAYOUT)
    log: list[str] = []
    mover = host_mover(pool, way, log=log)
    moves = [made_move(made, LAYOUT, blocks) for blocks in CHUNKS]
    pool.layer_view(0, 2, Part.V)[CHUNKS[2][3], 1, 1, 5] = float("nan")
    with pytest.raises(CodecError, match="int8 cannot pack"):
        mover.move(Direction.STORE, shipments(made, moves), None)
    assert "store finish" in log


def test_b16_what_does_not_fit_is_refused_before_a_byte_is_written() -> None:
    pool = pool_for(LAYOUT)
    made = made_codec("raw", LAYOUT)
    mover = host_mover(pool, DIRECT)
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
            mover.move(Direction.LOAD, shipments(made, [bad]), None)
    (short,) = shipments(made, [good])
    with pytest.raises(LayoutError, match="shorter than"):
        mover.move(Direction.LOAD, [replace(short, payload=short.payload[:-1])], None)
    twice = shipments(made, [good, made_move(made, LAYOUT, CHUNKS[0])])
    with pytest.raises(LayoutError, match="named twice"):
        mover.move(Direction.LOAD, twice, None)
    assert pool.snapshot() == before
