"""What pack and unpack are measured with: a pool, slots, a gate, ways, a model beside them.

Needs a CUDA device and the source tree alone. The pool is that of Llama-3.1-8B: 32 layers, 8 heads
of 128 values, bfloat16, 32,768 tokens in scattered pages of 16; all of it moves, in chunks of 256.
Times are those of a caller, from the call to its return. Every byte is cold: the pool is seventy
times the L2 cache.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from bench.lib.report import spread
from kvtier.codecs import rotated
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.gpu import GpuMover, Shipment, batches
from kvtier.codecs.grouped import GroupedInt4Codec
from kvtier.codecs.lossless import LosslessCodec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.sections import section_offset
from kvtier.interfaces import BlockCodec
from kvtier.testing.calibrations import made_up_calibration
from kvtier.types import Direction, HeadSlice, Move, Part, ShardId, ShardLayout, Slot
from kvtier_kernels.transfer.lane import CudaQueues, Lane, Way
from kvtier_kernels.transfer.stripes import field_alignments
from kvtier_kernels.transfer.triton import UNLIMITED, launch

HBM: Final = Way(direct=True, programs=UNLIMITED)
STAGED: Final = Way(direct=False, programs=32)


class Pool:
    """One allocation ``[block, token, head, dim]`` for each layer's K and V."""

    def __init__(
        self, layout: ShardLayout, block_count: int, block_tokens: int, device: str
    ) -> None:
        generator = torch.Generator(device).manual_seed(1)
        shape = (block_count, block_tokens, layout.kv_heads, layout.k_dim)
        dtype = getattr(torch, layout.dtype)
        self.block_count = block_count
        self.block_tokens = block_tokens
        self.views = {
            (layer, part): torch.empty(shape, dtype=dtype, device=device).normal_(
                generator=generator
            )
            for layer in range(layout.layers)
            for part in (Part.K, Part.V)
        }

    @property
    def stream(self) -> int:
        """The default stream."""
        return 0

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        """See ``PagedPool``."""
        assert group == 0, "one KV group"
        return self.views[layer, part]

    def cut(self, layout: ShardLayout, blocks: Sequence[int]) -> Pool:
        """A pool in the host's memory with copies of some blocks."""
        made = Pool(layout, len(blocks), self.block_tokens, "cpu")
        for key, view in self.views.items():
            made.views[key] = view[list(blocks)].cpu()
        return made


class Lab:
    """One direction: what is moved, and how it is timed."""

    def __init__(self, direction: Direction, *, tokens: int = 32_768, layers: int = 32) -> None:
        self.direction = direction
        self.name = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        self.layout = ShardLayout(layers, 8, 128, 128, "bfloat16", 256)
        self.pool = Pool(self.layout, tokens // 16, 16, self.device)
        self.chunks = (
            torch.randperm(tokens // 16, generator=torch.Generator().manual_seed(2))
            .view(-1, 16)
            .tolist()
        )
        self.pool_bytes = sum(view.nbytes for view in self.pool.views.values())
        # The largest codec's payloads; also for an engine's pages, which have no section.
        self.slots = self.pinned(self.pool_bytes)
        self.way = Way(direct=True, programs=UNLIMITED)
        self.lanes = {
            one: Lane(self.queues(one), packs=one is Direction.STORE) for one in Direction
        }
        self.mover = GpuMover(self.pool, self.lanes, lambda *_: True, lambda *_: self.way)
        self.idle = self.mark()

    device = "cuda"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def queues(self, direction: Direction) -> Any:
        """Streams of a lane."""
        return CudaQueues(torch.device("cuda", 0), urgent=direction is Direction.LOAD)

    def mark(self) -> Any:
        """An event on the default stream."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream())
        return event

    def codec(self, name: str) -> BlockCodec:
        """A codec by name, without the registry, which needs an installed package."""
        makers: dict[str, Callable[[], BlockCodec]] = {
            "raw": RawCodec,
            "fp8": Fp8Codec,
            "int4-g128": GroupedInt4Codec,
            "lossless": LosslessCodec,
            "int8": rotated.int8,
            "int6": rotated.int6,
            "int5k4v": rotated.int5k4v,
            "int4": lambda: rotated.int4(made_up_calibration(self.layout)),
        }
        return makers[name]()

    def shipments(self, codec: BlockCodec, chunks: Sequence[int]) -> list[Shipment]:
        """Whole chunks and their slots; the first one's sink tokens are kept, if any are."""
        made: list[Shipment] = []
        start = 0
        host = self.slots.numpy().data
        for nth in chunks:
            sinks = codec.traits.sink_tokens if nth == 0 else 0
            layout = replace(self.layout, sink_tokens=sinks)
            nbytes = section_offset(codec, layout, layout.sections)
            move = Move(
                worker=0,
                codec=codec.name,
                shard=ShardId(0, 0, 0),
                layout=layout,
                slot=Slot(start, nbytes),
                payload_offset=0,
                first_section=0,
                section_count=layout.sections,
                heads=HeadSlice(0, 0, layout.kv_heads),
                pool_layer_start=0,
                token_start=0,
                token_count=layout.tokens,
                block_ids=tuple(self.chunks[nth]),
                position_start=nth * layout.tokens,
            )
            made.append(Shipment(codec, move, host[start : start + nbytes]))
            start += nbytes
        return made

    def move(self, shipments: Sequence[Shipment], direction: Direction, way: Way) -> None:
        """Move as a worker does."""
        self.way = way
        self.mover.move(direction, batches(shipments), self.idle)

    def gate(self, codec: BlockCodec, way: Way) -> None:
        """The first two chunks: slots and blocks as the reference on the CPU leaves them."""
        shipments = self.shipments(codec, range(2))
        for shipment in shipments:
            blocks = shipment.move.block_ids
            few = self.pool.cut(self.layout, blocks)
            local = replace(shipment.move, block_ids=tuple(range(len(blocks))))
            expected = bytearray(shipment.payload.nbytes)
            codec.pack(few, local, memoryview(expected))
            shipment.payload[:] = bytes(shipment.payload.nbytes)
            self.move([shipment], Direction.STORE, way)
            if shipment.payload != expected:
                raise AssertionError(f"{codec.name}: other bytes than the reference's")
            kept = {key: view[list(blocks)].clone() for key, view in self.pool.views.items()}
            for view in self.pool.views.values():
                view[list(blocks)] = float("nan")
            self.idle = self.mark()
            self.move([shipment], Direction.LOAD, way)
            codec.unpack(shipment.payload, few, local)
            for key, view in self.pool.views.items():
                found = view[list(blocks)].view(torch.int16).cpu()
                if not torch.equal(found, few.views[key].view(torch.int16)):
                    raise AssertionError(f"{codec.name}: other values than the reference's")
                view[list(blocks)] = kept[key]
            self.idle = self.mark()

    def timed(self, codec: BlockCodec, way: Way, rounds: int) -> dict[str, Any]:
        """GB/s of the pool's bytes and of those on the link, of all chunks."""
        shipments = self.shipments(codec, range(len(self.chunks)))
        packed = sum(shipment.payload.nbytes for shipment in shipments)
        if self.direction is Direction.LOAD:
            self.move(shipments, Direction.STORE, STAGED)
        self.move(shipments, self.direction, way)
        seconds: list[float] = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.move(shipments, self.direction, way)
            seconds.append(time.perf_counter() - start)
        return {
            "gb_per_s": spread([self.pool_bytes / each / 1e9 for each in seconds]),
            "wire_gb_per_s": packed / statistics.median(seconds) / 1e9,
            "ms": spread([each * 1e3 for each in seconds]),
        }

    def timed_in_hbm(self, codec: BlockCodec, way: Way, rounds: int) -> dict[str, Any]:
        """The kernels alone, between the pool and a buffer on the device."""
        shipments = [
            s for s in self.shipments(codec, range(len(self.chunks))) if s.move.position_start
        ]
        batch = self.mover.batch(self.direction, shipments[:64])
        nbytes = shipments[0].payload.nbytes
        buffer = torch.randint(0, 255, (64 * nbytes,), dtype=torch.uint8, device=self.device)
        if self.direction is Direction.LOAD:
            # Real codes and scales, not noise.
            self.move(shipments[:64], Direction.STORE, HBM)
            for nth, shipment in enumerate(shipments[:64]):
                host = torch.frombuffer(shipment.payload, dtype=torch.uint8)
                buffer[nth * nbytes : (nth + 1) * nbytes] = host.to(self.device)
        addresses = buffer.data_ptr() + nbytes * np.arange(len(batch.addresses))
        batch = replace(batch, addresses=addresses)
        failed = torch.zeros(1, dtype=torch.int32, device=self.device)
        blocks = torch.from_numpy(batch.blocks.reshape(-1)).to(self.device)
        sections, shards = range(len(batch.pattern.sections)), range(len(addresses))
        units = [(section, shard) for section in sections for shard in shards]
        offsets = [place.offset for place in batch.pattern.sections]
        bases = [int(addresses[shard]) + offsets[section] for section, shard in units]
        jobs = [(strip, batch.table(strip, units, bases)) for strip in batch.pattern.strips]
        ready = [
            (s, (torch.from_numpy(table).to(self.device), field_alignments(s.stripe, table)))
            for s, table in jobs
        ]

        def run() -> None:
            for strip, both in ready:
                launch(
                    way.shaped(strip.stripe), strip.form, batch.pattern.cut, both, blocks, failed,
                    packs=self.direction is Direction.STORE, programs=way.programs,
                )  # fmt: skip

        seconds = self.on_device(run, rounds)
        moved = self.pool_bytes * len(addresses) / len(self.chunks)
        return {"gb_per_s": spread([moved / each / 1e9 for each in seconds])}

    def on_device(self, run: Callable[[], object], rounds: int) -> list[float]:
        """Seconds by events, each round by itself."""
        run()
        seconds: list[float] = []
        for _ in range(rounds):
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds

    def limits(self) -> dict[str, float]:
        """GB/s of plain copies in this run; a copy within the device counts the bytes once."""
        nbytes = min(1 << 30, self.pool_bytes)
        host, one = self.slots[:nbytes], torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        two = torch.empty_like(one)
        copies = {
            "h2d": lambda: one.copy_(host, non_blocking=True),
            "d2h": lambda: host.copy_(one, non_blocking=True),
            "device": lambda: two.copy_(one),
        }
        return {
            name: nbytes / statistics.median(self.on_device(copy, 7)) / 1e9
            for name, copy in copies.items()
        }

    def matrices(self, codec: BlockCodec | None, way: Way, rounds: int = 60) -> dict[str, Any]:
        """Milliseconds of a matrix product while another thread moves all chunks over and over."""
        left = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        right = torch.randn_like(left)
        shipments = [] if codec is None else self.shipments(codec, range(len(self.chunks)))
        done, moved = threading.Event(), [0]

        def move() -> None:
            while not done.is_set():
                self.move(shipments, self.direction, way)
                moved[0] += 1

        thread = threading.Thread(target=move, daemon=True)
        if shipments:
            thread.start()
        began = time.perf_counter()
        seconds = self.on_device(lambda: torch.matmul(left, right), rounds)
        elapsed = time.perf_counter() - began
        done.set()
        if shipments:
            thread.join()
        return {
            "matrix_ms": spread([each * 1e3 for each in seconds]),
            "gb_per_s_beside": moved[0] * self.pool_bytes / elapsed / 1e9,
        }
