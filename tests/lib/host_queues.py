"""Movers for tests: on a GPU; or in Triton's interpreter, with queues that do all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from kvtier.codecs import rotated
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.gpu import GpuMover, Shipment, StripedCodec
from kvtier.codecs.grouped import GroupedInt4Codec
from kvtier.codecs.lossless import LosslessCodec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.sections import section_offset
from kvtier.interfaces import PagedPool
from kvtier.testing.calibrations import made_up_calibration
from kvtier.testing.pools import POISON
from kvtier.types import Direction, HeadSlice, Move, ShardId, ShardLayout, Slot
from tests.lib.interpreted import choose_interpreter

choose_interpreter()

from kvtier_kernels.transfer.lane import (  # noqa: E402
    STAGING_BYTES,
    CudaQueues,
    Lane,
    Queues,
    Way,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


CODECS = ("raw", "fp8", "int8", "int6", "int5k4v", "int4", "int4-g128", "lossless")


class HostQueues:
    """Does at once what it is given (on a GPU: on the current stream), and notes in which order.

    ``log`` may be shared.
    """

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE)

    @property
    def handle(self) -> int:
        return 0

    def run(self, *, copies: bool) -> AbstractContextManager[object]:
        return self._run("copies" if copies else "kernels")

    @contextmanager
    def _run(self, queue: str) -> Iterator[None]:
        self._log.append(f"{self._name} {queue}")
        # The interpreter computes with numpy, which warns of NaN and infinity.
        with np.errstate(all="ignore"):
            yield

    def mark(self, *, copies: bool) -> str:
        mark = f"mark {len(self._log)}"
        self._log.append(f"{self._name} {'copies' if copies else 'kernels'} {mark}")
        return mark

    def wait(self, mark: object, *, copies: bool) -> None:
        self._log.append(f"{self._name} {'copies' if copies else 'kernels'} wait for {mark}")

    def ended(self, mark: object) -> bool:
        return not CUDA

    def finish(self, mark: object) -> None:
        self._log.append(f"{self._name} finish {mark}")
        if CUDA:
            torch.cuda.synchronize()


def queues_for(direction: Direction, log: list[str] | None) -> Queues:
    """A GPU's streams if there is one and nobody wants a log."""
    if CUDA and log is None:
        return CudaQueues(torch.device("cuda", 0), urgent=direction is Direction.LOAD)
    return HostQueues(direction, [] if log is None else log)


def made_mover(
    pool: PagedPool,
    way: Way,
    *,
    reached: bool = True,
    log: list[str] | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> GpuMover:
    """A mover for a pool on ``DEVICE``; with a ``log``, in what order its lanes do what."""
    lanes = {
        direction: Lane(
            queues_for(direction, log),
            packs=direction is Direction.STORE,
            staging_bytes=staging_bytes,
        )
        for direction in Direction
    }
    reaches: Callable[[int, int], bool] = lambda *_: reached  # noqa: E731
    return GpuMover(pool, lanes, reaches, lambda *_: way)


def made_codec(name: str, layout: ShardLayout) -> StripedCodec:
    """A codec by name; one that needs it has a calibration that was made up.

    Not by the registry, so that a machine with a GPU needs no more than the source tree.
    """
    makers: dict[str, Callable[[], StripedCodec]] = {
        "raw": RawCodec,
        "fp8": Fp8Codec,
        "int4-g128": GroupedInt4Codec,
        "lossless": LosslessCodec,
        "int8": rotated.int8,
        "int6": rotated.int6,
        "int5k4v": rotated.int5k4v,
        "int4": lambda: rotated.int4(made_up_calibration(layout)),
    }
    return makers[name]()


def made_move(
    codec: StripedCodec,
    layout: ShardLayout,
    blocks: tuple[int, ...],
    *,
    rows: tuple[int, int] | None = None,
    heads: HeadSlice | None = None,
    position: int = 0,
    sections: range | None = None,
) -> Move:
    """A move of some rows (start, count) and heads, by default of all."""
    start, count = rows or (0, layout.tokens)
    some = range(layout.sections) if sections is None else sections
    return Move(
        worker=0,
        codec=codec.name,
        shard=ShardId(0, 0, 0),
        layout=layout,
        slot=Slot(0, 0),
        payload_offset=0,
        first_section=some.start,
        section_count=len(some),
        heads=heads or HeadSlice(0, 0, layout.kv_heads),
        pool_layer_start=0,
        token_start=start,
        token_count=count,
        block_ids=blocks,
        position_start=position,
    )


def made_mark() -> object:
    """All that the current stream has been given; without a GPU everything has been done."""
    if not CUDA:
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def shipments(codec: StripedCodec, moves: list[Move], *, pageable: bool = False) -> list[Shipment]:
    """Moves with poisoned payloads of their own, which a GPU reaches unless ``pageable``."""
    nbytes = section_offset(codec, moves[0].layout, moves[0].layout.sections)
    made: list[Shipment] = []
    for move in moves:
        locked = CUDA and not pageable
        slot = torch.full((nbytes,), POISON, dtype=torch.uint8)
        slot = slot.pin_memory() if locked else slot
        made.append(Shipment(codec, move, slot.numpy().data))
    return made
