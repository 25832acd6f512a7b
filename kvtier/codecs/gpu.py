"""Many moves at once between a pool on a GPU and arena slots, on streams of their own.

The codecs' own ``pack`` and ``unpack`` move one section after the other and wait for each; here one
launch moves a stripe of many shards. What is written is the same, bit for bit.

*Order.* A store reads blocks, and a load writes them, after all that the engine had given its
stream when it asked: ``mark``, called in the engine's thread, names that point. ``move`` returns
when everything has ended, in failure too; the next batch is laid out while one is under way. So
nothing is written late, and blocks that were loaded in part are as good as not loaded: the plan has
failed, and the engine, which holds them until it knows, computes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from kvtier.codecs.paged import as_our_error, as_tensor, move_span, section_layers
from kvtier.codecs.sections import section_offset
from kvtier.errors import CodecError, LayoutError
from kvtier.interfaces import BlockCodec, PagedPool
from kvtier.types import Direction, Move, Part

if TYPE_CHECKING:
    import torch

    from kvtier_kernels.transfer.batch import Batch, Pattern
    from kvtier_kernels.transfer.lane import Lane, Running, Way
    from kvtier_kernels.transfer.stripes import Stripe

#: Bytes and moves of a batch: 2 GiB take 40 ms, which a deadline can wait.
BATCH_BYTES_MAX: Final = 1 << 31
BATCH_MOVES_MAX: Final = 256
#: Batches that the device works on while the host lays out the next one.
_BATCHES_UNDER_WAY: Final = 1
#: What a pause says: go on at any time; or once this is true.
Wait = Callable[[], bool] | None
#: Kinds of moves whose tables are kept: one for each KV group, codec and cut, as a rule.
_PATTERNS_MAX: Final = 64


@runtime_checkable
class StripedCodec(BlockCodec, Protocol):
    """A block codec whose sections kernels on a GPU can move, many at once."""

    def stripes(self, move: Move, section: int, device: torch.device) -> list[Stripe]:
        """What kernels move of one section."""
        ...


@runtime_checkable
class TurningCodec(Protocol):
    """A codec that turns what it takes from K, as RoPE turns K."""

    def turns(self, move: Move, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines of all of the chunk's rows, float16 on ``device``; None: none."""
        ...


@dataclass(frozen=True, slots=True)
class Shipment:
    """One move with its codec and its shard's bytes, from section 0 on."""

    codec: BlockCodec
    move: Move
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _PoolOn:
    """A pool whose blocks are written on another stream than its own."""

    pool: PagedPool
    stream: int

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def block_count(self) -> int:
        return self.pool.block_count

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        return self.pool.layer_view(group, layer, part)


class GpuMover:
    """Moves for one pool. ``mark`` may be any thread's, all else is one thread's at a time.

    ``reaches`` tells whether kernels reach memory of the host, by address and length, ``ways``
    chooses by codec and direction.
    """

    def __init__(
        self,
        pool: PagedPool,
        lanes: Mapping[Direction, Lane],
        reaches: Callable[[int, int], bool],
        ways: Callable[[str, Direction], Way],
    ) -> None:
        self._pool = pool
        self._lanes = lanes
        self._device = lanes[Direction.LOAD].queues.device
        self._reaches = reaches
        self._ways = ways
        # With its codec, whose id is part of the key.
        self._patterns: OrderedDict[object, tuple[StripedCodec, Pattern]] = OrderedDict()

    def move(
        self,
        direction: Direction,
        kinds: Iterable[Sequence[Shipment]],
        after: Any,
        late: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Do as ``moving`` says in one go."""
        steps = self.moving(direction, kinds, after, late)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return bool(end.value)

    def moving(
        self,
        direction: Direction,
        kinds: Iterable[Sequence[Shipment]],
        after: Any,
        late: Callable[[], bool],
    ) -> Generator[Wait, None, bool]:
        """Make moves, as ``batches`` gives them, after ``after``; False: it had become ``late``.

        Returns at their end. Raises what the codec's ``pack`` and ``unpack`` do; payloads or
        blocks, of all of the moves, are undefined then. Pauses with None while it gives the device
        work, and nobody else may then; and where it would wait, with what tells when that is over.
        """
        under_way: deque[tuple[Shipment, Running]] = deque()
        lane = self._lanes[direction]

        def finish() -> Iterator[Wait]:
            shipment, running = under_way[0]
            if not lane.ended(running):
                yield partial(lane.ended, running)
            under_way.popleft()
            if not lane.finish(running):
                raise CodecError(f"{shipment.codec.name} cannot pack some of the values")

        try:
            for shipments in kinds:
                if late():
                    return False
                started = yield from self._start(direction, shipments, after)
                if started is not None:
                    under_way.append((shipments[0], started))
                if len(under_way) > _BATCHES_UNDER_WAY:
                    yield from finish()
            while under_way:
                yield from finish()
            return True
        finally:
            for _, running in under_way:
                lane.finish(running)

    def _start(
        self, direction: Direction, shipments: Sequence[Shipment], after: Any
    ) -> Generator[None, None, Running | None]:
        """Begin with one batch, or have its codec move it, and then it has ended."""
        assert 0 < len(shipments) <= BATCH_MOVES_MAX, "a batch is bounded"
        first = shipments[0]
        way = self._ways(first.codec.name, direction)
        span = move_span(first.move)
        reached = all(self._reaches(*_place(shipment.payload)) for shipment in shipments)
        stores_part = direction is Direction.STORE and not span.whole
        if not isinstance(first.codec, StripedCodec) or (stores_part and not reached):
            # Another's codec; or rows of planes that only the host can place.
            self._by_codec(direction, shipments, after)
            return None
        direct = reached and (way.direct or stores_part)
        with as_our_error(first.move):
            batch = self.batch(direction, shipments)
            lane = self._lanes[direction]
            return (yield from lane.start(batch, replace(way, direct=direct), after))

    def _by_codec(self, direction: Direction, shipments: Sequence[Shipment], after: Any) -> None:
        """Have the codec move one after the other, on this direction's stream."""
        queues = self._lanes[direction].queues
        queues.wait(after, copies=False)
        with queues.run(copies=False):
            one_by_one(direction, shipments, _PoolOn(self._pool, queues.handle))

    def batch(self, direction: Direction, shipments: Sequence[Shipment]) -> Batch:
        """Check moves of one kind against each other and the pool, and lay their table out."""
        import numpy as np

        from kvtier_kernels.transfer.batch import Batch

        codec = shipments[0].codec
        assert isinstance(codec, StripedCodec), "another's codec in a batch"
        pattern = self._pattern(codec, shipments[0])
        moves = [shipment.move for shipment in shipments]
        blocks = np.array([move.block_ids for move in moves], np.int64)
        if blocks.min() < 0 or blocks.max() >= self._pool.block_count:
            raise LayoutError(f"a block id lies outside 0 .. {self._pool.block_count - 1}")
        if direction is Direction.LOAD and len(np.unique(blocks)) < blocks.size:
            raise LayoutError("a block is named twice")
        end = pattern.sections[-1].offset + pattern.sections[-1].nbytes
        if any(shipment.payload.nbytes < end for shipment in shipments):
            raise LayoutError(f"a payload is shorter than {end} bytes")
        codec = shipments[0].codec
        turned = (
            [codec.turns(m, self._device) for m in moves] if isinstance(codec, TurningCodec) else []
        )
        return Batch(
            pattern,
            [shipment.payload for shipment in shipments],
            np.array([_place(shipment.payload)[0] for shipment in shipments], np.int64),
            blocks,
            [turns for turns in turned if turns is not None],
        )

    def _pattern(self, codec: StripedCodec, shipment: Shipment) -> Pattern:
        key = kind(shipment)
        known = self._patterns.get(key)
        if known is None:
            known = self._patterns[key] = codec, self._make_pattern(codec, shipment.move)
            if len(self._patterns) > _PATTERNS_MAX:
                self._patterns.popitem(last=False)
        self._patterns.move_to_end(key)
        return known[1]

    def _make_pattern(self, codec: StripedCodec, move: Move) -> Pattern:
        from kvtier_kernels.raw import check_span
        from kvtier_kernels.transfer.batch import Pattern, SectionPlace
        from kvtier_kernels.transfer.stripes import Cut

        stop = move.first_section + move.section_count
        if not 0 <= move.first_section < stop <= move.layout.sections:
            raise LayoutError(f"the shard has {move.layout.sections} sections: {move}")
        places: list[SectionPlace] = []
        for section in range(move.first_section, stop):
            layers = section_layers(self._pool, move, section)
            check_span(layers, move_span(move))
            place = SectionPlace(
                section_offset(codec, move.layout, section),
                codec.section_bytes(move.layout, section),
                section_offset(codec, move.layout, section + 1),
                tuple(codec.stripes(move, section, self._device)),
                tuple(layers),
            )
            places.append(place)
        return Pattern(tuple(places), Cut.of(move_span(move), self._pool.block_tokens))


def cuda_mover(pool: PagedPool) -> GpuMover:
    """Make the mover for a pool on a CUDA device. Loads are urgent, stores are not."""
    from kvtier_kernels import pinned
    from kvtier_kernels.transfer.lane import CudaQueues, Lane
    from kvtier_kernels.transfer.ways import way_of

    device = pool_device(pool)
    lanes = {
        direction: Lane(
            CudaQueues(device, urgent=direction is Direction.LOAD),
            packs=direction is Direction.STORE,
        )
        for direction in Direction
    }

    def way(name: str, direction: Direction) -> Way:
        return way_of(name, packs=direction is Direction.STORE)

    return GpuMover(pool, lanes, pinned.locked, way)


def mark(pool: PagedPool) -> torch.cuda.Event:
    """Name what the pool's stream was given so far; in the engine's thread, which has its own."""
    import torch

    device = pool_device(pool)
    stream: torch.cuda.Stream
    if pool.stream:
        stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            pool.stream, device=device
        )
    else:
        stream = torch.cuda.default_stream(device)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def pool_device(pool: PagedPool) -> torch.device:
    """The device on which a pool lies."""
    device: torch.device = as_tensor(pool.layer_view(0, 0, Part.K)).device
    return device


def _place(payload: memoryview) -> tuple[int, int]:
    """Where bytes lie, and how many."""
    import numpy as np

    address: int = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    return address, payload.nbytes


def one_by_one(direction: Direction, shipments: Sequence[Shipment], pool: PagedPool) -> None:
    """Have the codecs move each shipment by itself."""
    for shipment in shipments:
        if direction is Direction.LOAD:
            shipment.codec.unpack(shipment.payload, pool, shipment.move)
        else:
            shipment.codec.pack(pool, shipment.move, shipment.payload)


def kind(shipment: Shipment) -> object:
    """What moves have in common that one batch may have."""
    move = shipment.move
    sections = move.first_section, move.section_count
    rows = move.token_start, move.token_count, move.heads, len(move.block_ids)
    return (
        shipment.codec.name,
        id(shipment.codec),
        move.shard,
        move.layout,
        move.pool_layer_start,
        sections,
        rows,
    )


def batches(shipments: Iterable[Shipment]) -> Iterator[list[Shipment]]:
    """Cut into what ``GpuMover.move`` takes: each kind by itself, in the order of first ones."""
    kinds: dict[object, list[Shipment]] = {}
    for shipment in shipments:
        kinds.setdefault(kind(shipment), []).append(shipment)
    for alike in kinds.values():
        batch: list[Shipment] = []
        room = BATCH_BYTES_MAX
        for shipment in alike:
            if batch and (shipment.payload.nbytes > room or len(batch) == BATCH_MOVES_MAX):
                yield batch
                batch, room = [], BATCH_BYTES_MAX
            batch.append(shipment)
            room -= shipment.payload.nbytes
        yield batch
