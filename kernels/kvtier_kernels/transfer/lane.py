"""One direction of transfers on a device: two queues of its own, and how a batch goes through them.

*Direct*: a kernel's own loads and stores cross the link, one launch for all of a stripe.
*Staged*: a kernel works between the pool and a buffer on the device, and a copy engine between that
buffer and the host. There are two buffers: while a kernel works on one, the other is copied.

    store   kernels  pack 0 | pack 1 |  pack 2 (waits for copy 0)
            copies            copy 0 |  copy 1 | copy 2

Nothing here runs on the default stream. What a lane does starts after the mark that it is given,
and ``run`` returns, in success or failure, when all of it has ended: no late write lands in a block
or a slot that was given to somebody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvtier_kernels.transfer.batch import Batch, Strip
from kvtier_kernels.transfer.stripes import Stripe, Table

#: Bytes of one of a lane's two buffers.
STAGING_BYTES: Final = 16 << 20

_LINE_BYTES: Final = 128


class Queues(Protocol):
    """Where a lane's work runs, in order within each of two queues."""

    @property
    def device(self) -> torch.device:
        """The pool's device."""

    def run(self, *, copies: bool) -> AbstractContextManager[object]:
        """What is started within goes to the queue of copies, or else to that of kernels."""

    def mark(self, *, copies: bool) -> Any:
        """Name what a queue was given so far."""

    def wait(self, mark: Any, *, copies: bool) -> None:
        """Start what a queue is given from now on only when the marked work has ended."""

    def finish(self) -> None:
        """Wait until both queues are empty."""

    @property
    def handle(self) -> int:
        """The queue of kernels, as CUDA calls it."""


class CudaQueues:
    """Two streams; ``urgent`` ones go before other streams' work where both could run."""

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._device = device
        priority = -1 if urgent else 0
        self._streams = tuple(
            torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    @property
    def device(self) -> torch.device:
        """The streams' device."""
        return self._device

    def run(self, *, copies: bool) -> AbstractContextManager[object]:
        """Make a stream the current one."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._streams[copies])
        return context

    def mark(self, *, copies: bool) -> torch.cuda.Event:
        """Record an event, which sleeping threads can wait for."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[copies])
        return event

    def wait(self, mark: torch.cuda.Event, *, copies: bool) -> None:
        """Have a stream wait for an event."""
        self._streams[copies].wait_event(mark)

    def finish(self) -> None:
        """Sleep until both streams are idle."""
        for copies in (False, True):
            self.mark(copies=copies).synchronize()

    @property
    def handle(self) -> int:
        """The stream's handle."""
        return int(self._streams[0].cuda_stream)


@dataclass(frozen=True, slots=True)
class Way:
    """How a codec's bytes cross the link in one direction.

    ``programs`` bound how many multiprocessors the kernel takes. ``rows`` of a tile, ``warps`` of
    a program and ``stages`` (tiles in flight) replace what the kernel has for itself; 0 does not.
    """

    direct: bool
    programs: int
    rows: int = 0
    warps: int = 0
    stages: int = 0

    def shaped(self, stripe: Stripe) -> Stripe:
        """The stripe with this way's tile."""
        constants, options = dict(stripe.constants), dict(stripe.options)
        if self.rows:
            constants["ROWS"] = min(self.rows, _power_of_two(stripe.rows))
        if self.stages:
            constants["STAGES"] = self.stages
        if self.warps:
            options["num_warps"] = self.warps
        return replace(stripe, constants=constants, options=options)


class _Jobs(NamedTuple):
    """A strip's table and its copy on the device."""

    strip: Strip
    table: Table
    on_device: torch.Tensor


class Lane:
    """Runs batches in one direction. One thread at a time.

    Each of its two buffers has ``staging_bytes``, or the bytes of a section that is larger.
    """

    def __init__(self, queues: Queues, *, packs: bool, staging_bytes: int = STAGING_BYTES) -> None:
        self.queues = queues
        self._packs = packs
        self._staging_bytes = staging_bytes
        self._staging = torch.empty(0, dtype=torch.uint8)

    def run(self, batch: Batch, way: Way, after: Any) -> bool:
        """Move a batch once the marked work has ended; False: some values cannot be packed.

        Returns when all is done, and raises only then too. Direct ways need payloads that kernels
        reach, and staged ones whole sections to store. After False or an error, what the batch's
        targets hold is undefined.
        """
        queues = self.queues
        queues.wait(after, copies=False)
        queues.wait(after, copies=True)
        with queues.run(copies=False):
            failed = torch.zeros(1, dtype=torch.int32, device=queues.device)
            blocks = self._on_device(batch.blocks.reshape(-1))
        try:
            if way.direct:
                self._direct(batch, way, blocks, failed)
            else:
                self._staged(batch, way, blocks, failed)
        finally:
            queues.finish()
        if not self._packs:
            return True
        batch.zero_pads()
        with queues.run(copies=False):
            return not failed.item()

    def _direct(self, batch: Batch, way: Way, blocks: torch.Tensor, failed: torch.Tensor) -> None:
        units = batch.units
        offsets = [place.offset for place in batch.pattern.sections]
        bases = [int(batch.addresses[shard]) + offsets[section] for section, shard in units]
        self._launch(self._jobs(batch, bases), way, batch, blocks, failed)

    def _staged(self, batch: Batch, way: Way, blocks: torch.Tensor, failed: torch.Tensor) -> None:
        """Slice by slice, each in the buffer that the slice before the last has left."""
        sizes = [_lines(place.nbytes) for place in batch.pattern.sections]
        half = max(self._staging_bytes, *sizes)
        self._make_room(2 * half)
        slices = list(_slices(batch.units, sizes, half))
        starts: list[int] = []
        for nth, units in enumerate(slices):
            ends = itertools.accumulate((sizes[section] for section, _ in units), initial=0)
            starts += [half * (nth % 2) + end for end in ends][:-1]
        jobs = self._jobs(batch, [self._staging.data_ptr() + start for start in starts])
        left: list[Any] = [None, None]
        first_unit = first_row = 0
        for nth, units in enumerate(slices):
            rows = sum(len(batch.pattern.sections[section].layers) for section, _ in units)
            part = slice(first_row, first_row + rows)
            places = starts[first_unit : first_unit + len(units)]
            some = [_Jobs(one.strip, one.table[part], one.on_device[part]) for one in jobs]
            kernels = partial(self._launch, some, way, batch, blocks, failed)
            copies = partial(self._copy, batch, units, places)
            left[nth % 2] = self._chain(kernels, copies, left[nth % 2])
            first_unit, first_row = first_unit + len(units), first_row + rows

    def _make_room(self, nbytes: int) -> None:
        if self._staging.numel() < nbytes:
            with self.queues.run(copies=False):
                device = self.queues.device
                self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _jobs(self, batch: Batch, bases: Sequence[int]) -> list[_Jobs]:
        """All of the batch's jobs, uploaded once, with its units' sections at ``bases``."""
        with self.queues.run(copies=False):
            made: list[_Jobs] = []
            for strip in batch.pattern.strips:
                table = batch.table(strip, batch.units, bases)
                made.append(_Jobs(strip, table, self._on_device(table)))
            return made

    def _chain(self, kernels: Callable[[], None], copies: Callable[[], None], left: Any) -> Any:
        """Pack, then copy, or copy, then unpack, in a buffer that ``left`` says is free again."""
        first_copies = not self._packs
        if left is not None:
            self.queues.wait(left, copies=first_copies)
        (copies if first_copies else kernels)()
        self.queues.wait(self.queues.mark(copies=first_copies), copies=not first_copies)
        (kernels if first_copies else copies)()
        return self.queues.mark(copies=not first_copies)

    def _copy(self, batch: Batch, units: Sequence[tuple[int, int]], starts: Sequence[int]) -> None:
        """Copy units' sections between the host and the buffers."""
        with self.queues.run(copies=True):
            for unit, start in zip(units, starts, strict=True):
                section = batch.section_bytes(unit)
                host = torch.frombuffer(section, dtype=torch.uint8)
                staging = self._staging[start : start + section.nbytes]
                if self._packs:
                    host.copy_(staging, non_blocking=True)
                else:
                    staging.copy_(host, non_blocking=True)

    def _launch(
        self,
        jobs: Sequence[_Jobs],
        way: Way,
        batch: Batch,
        blocks: torch.Tensor,
        failed: torch.Tensor,
    ) -> None:
        from kvtier_kernels.transfer.triton import launch

        with self.queues.run(copies=False):
            for one in jobs:
                launch(
                    way.shaped(one.strip.stripe),
                    one.strip.form,
                    batch.pattern.cut,
                    (one.table, one.on_device),
                    blocks,
                    failed,
                    packs=self._packs,
                    programs=way.programs,
                )

    def _on_device(self, numbers: Table) -> torch.Tensor:
        """A copy that does not wait for the device."""
        host = torch.from_numpy(numbers)
        if self.queues.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.queues.device, non_blocking=True)


def _slices(
    units: Sequence[tuple[int, int]], sizes: Sequence[int], nbytes_max: int
) -> Iterator[list[tuple[int, int]]]:
    """Cut units, in order, into runs whose sections together fit into ``nbytes_max``."""
    run: list[tuple[int, int]] = []
    room = nbytes_max
    for unit in units:
        size = sizes[unit[0]]
        if size > room:
            yield run
            run, room = [], nbytes_max
        run.append(unit)
        room -= size
    yield run


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
