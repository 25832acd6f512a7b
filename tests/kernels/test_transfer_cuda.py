"""What only a GPU can show of transfers: streams, large offsets, repeatability."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvtier.cache.worker import CacheWorker
from kvtier.codecs.gpu import Shipment, batches, cuda_mover, mark
from kvtier.codecs.sections import section_offset
from kvtier.interfaces import BlockCodec
from kvtier.testing.pools import TorchPool
from kvtier.types import (
    Direction,
    GroupKind,
    KVGroup,
    Part,
    Placement,
    Plan,
    Result,
    ShardLayout,
    Slot,
)
from kvtier_kernels import pinned
from tests.lib.host_queues import CODECS, CUDA, made_codec, made_mark, made_move, shipments

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

LAYOUT = ShardLayout(8, 8, 128, 128, "bfloat16", 256)
BLOCKS = tuple(range(31, 15, -1))


def keep_busy() -> None:
    """Give the current stream work for some 40 ms: longer than all that it is to be ahead of."""
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for _ in range(30):
        torch.mm(square, square)


def pool_for(layout: ShardLayout, block_count: int = 48, device: str = "cuda") -> TorchPool:
    group = KVGroup(GroupKind.FULL, tuple(range(layout.layers)), 8, 128, 128, "bfloat16")
    return TorchPool([group], block_count=block_count, block_tokens=16, device=device)


def in_a_thread(run: Callable[[], object]) -> None:
    """As a worker does: on none of the engine's streams."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def locked_shipment(name: str) -> tuple[Shipment, memoryview]:
    """A whole chunk in memory that was page-locked as an arena is."""
    made = made_codec(name, LAYOUT)
    (shipment,) = shipments(made, [made_move(made, LAYOUT, BLOCKS)], pageable=True)
    assert pinned.register(shipment.payload)
    return shipment, shipment.payload


@pytest.mark.parametrize("name", ["raw", "int5k4v"])
def test_b01_a_store_has_what_was_written_just_before(name: str) -> None:
    """A long kernel, then new values: on a stream of the engine's, 20 times."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = pool_for(LAYOUT)
    mover = cuda_mover(pool)
    shipment, memory = locked_shipment(name)
    try:
        for nth in range(20):
            with torch.cuda.stream(stream):
                keep_busy()
                for layer in range(LAYOUT.layers):
                    pool.layer_view(0, layer, Part.K).fill_(nth + 1)
                    pool.layer_view(0, layer, Part.V).fill_(-nth - 1)
                after = mark(pool)
            in_a_thread(partial(mover.move, Direction.STORE, [[shipment]], after))
            reference = pool_for(LAYOUT, device="cpu")
            for layer in range(LAYOUT.layers):
                reference.layer_view(0, layer, Part.K).fill_(nth + 1)
                reference.layer_view(0, layer, Part.V).fill_(-nth - 1)
            expected = bytearray(memory.nbytes)
            shipment.codec.pack(reference, shipment.move, memoryview(expected))
            assert memory == expected
    finally:
        pinned.unregister(memory)


def test_b02_a_load_comes_after_the_last_reader_of_its_blocks() -> None:
    """The blocks were another sequence's, whose last kernel still runs; 20 times."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = pool_for(LAYOUT)
    mover = cuda_mover(pool)
    shipment, memory = locked_shipment("raw")
    view = pool.layer_view(0, LAYOUT.layers - 1, Part.V)
    values = torch.frombuffer(memory, dtype=torch.bfloat16)
    try:
        for nth in range(20):
            view.fill_(1.5)
            values.fill_(nth)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                keep_busy()
                seen = view[list(BLOCKS)].clone()
                after = mark(pool)
            in_a_thread(partial(mover.move, Direction.LOAD, [[shipment]], after))
            # In place when the call returns, for whatever stream reads it now.
            assert torch.equal(view[list(BLOCKS)], torch.full_like(seen, nth))
            torch.cuda.synchronize()
            assert torch.equal(seen, torch.full_like(seen, 1.5))
    finally:
        pinned.unregister(memory)


@pytest.mark.parametrize("name", CODECS)
def test_b139_whole_chunks_equal_the_reference(name: str) -> None:
    """By the ways that are chosen for them, several chunks at once, into NaN."""
    made = made_codec(name, LAYOUT)
    pool, reference = pool_for(LAYOUT), pool_for(LAYOUT, device="cpu")
    for one in (pool, reference):
        one.fill_values(4)
    mover = cuda_mover(pool)
    first = replace(LAYOUT, sink_tokens=made.traits.sink_tokens)
    moves = [
        made_move(made, first, BLOCKS),
        made_move(made, LAYOUT, tuple(range(32, 48)), position=256),
        made_move(made, LAYOUT, tuple(range(16)), position=512),
    ]
    expected, found = (
        [s for move in moves for s in shipments(made, [move], pageable=pageable)]
        for pageable in (True, False)
    )
    for shipment in expected:
        made.pack(reference, shipment.move, shipment.payload)
    mover.move(Direction.STORE, batches(found), made_mark())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.payload == theirs.payload
        made.unpack(theirs.payload, reference, theirs.move)
    for layer in range(LAYOUT.layers):
        for part in Part:
            pool.layer_view(0, layer, part).fill_(float("nan"))
    mover.move(Direction.LOAD, batches(found), made_mark())
    assert pool.snapshot() == reference.snapshot()


@pytest.mark.parametrize("name", ["int5k4v", "fp8"])
def test_b141_twenty_encodes_are_identical(name: str) -> None:
    pool = pool_for(LAYOUT)
    pool.fill_values(5)
    mover = cuda_mover(pool)
    shipment, memory = locked_shipment(name)
    try:
        found: set[bytes] = set()
        for _ in range(20):
            mover.move(Direction.STORE, [[shipment]], made_mark())
            found.add(bytes(memory))
        assert len(found) == 1
    finally:
        pinned.unregister(memory)


@pytest.mark.parametrize("name", ["raw", "int8"])
def test_offsets_beyond_two_to_the_31st(name: str) -> None:
    """A pool of 2.3e9 values for each of K and V; its last blocks move."""
    layout = replace(LAYOUT, layers=1)
    count = 140_000
    made = made_codec(name, layout)
    pool, few = pool_for(layout, count), pool_for(layout, 16, "cpu")
    few.fill_values(6)
    blocks = tuple(range(count - 1, count - 17, -1))
    for part in Part:
        pool.layer_view(0, 0, part)[list(blocks)] = few.layer_view(0, 0, part).cuda()
    ours, theirs = made_move(made, layout, blocks), made_move(made, layout, tuple(range(16)))
    (expected,), (found,) = shipments(made, [theirs], pageable=True), shipments(made, [ours])
    made.pack(few, theirs, expected.payload)
    mover = cuda_mover(pool)
    mover.move(Direction.STORE, [[found]], made_mark())
    assert found.payload == expected.payload
    made.unpack(expected.payload, few, theirs)
    pool.poison()
    mover.move(Direction.LOAD, [[found]], made_mark())
    for part in Part:
        moved = pool.layer_view(0, 0, part)[list(blocks)].cpu()
        assert torch.equal(moved, few.layer_view(0, 0, part))


class KnownByName:
    """What a worker asks for codecs, without the registry."""

    def get(self, name: str) -> BlockCodec:
        return made_codec(name, LAYOUT)

    def observe(self, pool: object, move: object) -> None:
        """Nothing is learned."""


@pytest.mark.parametrize("locked", [True, False])
def test_b01_a_worker_stores_and_loads_behind_the_engines_stream(
    monkeypatch: pytest.MonkeyPatch, *, locked: bool
) -> None:
    """Plan by plan, asked for while the engine's kernels still run; also without page-locking."""
    if not locked:
        monkeypatch.setattr(pinned, "register", lambda _: False)
    made = made_codec("raw", LAYOUT)
    slot_bytes = section_offset(made, LAYOUT, LAYOUT.sections)
    arena = memoryview(bytearray(2 * slot_bytes))
    pool = pool_for(LAYOUT)
    worker = CacheWorker(Placement(), arena, codecs=KnownByName())  # type: ignore[arg-type]
    worker.register_pool(pool)
    moves = tuple(
        replace(made_move(made, LAYOUT, blocks), slot=Slot(nth * slot_bytes, slot_bytes))
        for nth, blocks in enumerate((BLOCKS, tuple(range(32, 48))))
    )
    deadline = time.monotonic() + 100
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        keep_busy()
        for layer in range(LAYOUT.layers):
            for part in Part:
                pool.layer_view(0, layer, part).normal_()
        stored = pool.layer_view(0, 7, Part.V)[list(BLOCKS)].clone()
        worker.execute(Plan(1, Direction.STORE, deadline, moves))
        while not (results := worker.poll()):
            torch.cuda.current_stream().synchronize()
        assert results == [Result(1, 0, ok=True)]
        keep_busy()
        pool.poison()
        worker.execute(Plan(2, Direction.LOAD, deadline, moves))
        while not (results := worker.poll()):
            torch.cuda.current_stream().synchronize()
        assert results == [Result(2, 0, ok=True)]
        assert torch.equal(pool.layer_view(0, 7, Part.V)[list(BLOCKS)], stored)
    worker.close()
