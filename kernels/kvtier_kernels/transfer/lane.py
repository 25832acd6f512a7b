"""One direction of transfers on a device: two queues of its own, and how a batch goes through them.

*Direct*: a kernel's own loads and stores cross the link, one launch for all of a stripe.
*Staged*: a kernel works between the pool and a buffer on the device, and a copy engine between that
buffer and the host. There are two buffers: while a kernel works on one, the other is copied.

    store   kernels  pack 0 | pack 1 |  pack 2 (waits for copy 0)
            copies            copy 0 |  copy 1 | copy 2

Nothing here runs on the default stream. What a lane does starts after the mark that it is given,
and ``finish`` returns when all of it has ended: no late write lands in a block or a slot that was
given to somebody else. A batch may be started while the one before it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvtier_kernels.transfer.batch import Batch, Pattern, Strip
from kvtier_kernels.transfer.stripes import Stripe, Table, field_alignments

#: Bytes of one of a lane's two buffers.
STAGING_BYTES: Final = 64 << 20

#: The first slice of a batch is this part of a buffer.
_FIRST_SHARE: Final = 8
#: Shards whose jobs are laid out first, before the device has something to do, and at a time.
_FIRST_SHARDS: Final = 16
_PART_SHARDS: Final = 64
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

    def ended(self, mark: Any) -> bool:
        """Tell whether the marked work has ended."""

    def finish(self, mark: Any) -> None:
        """Wait in this thread until the marked work has ended."""

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

    def ended(self, mark: torch.cuda.Event) -> bool:
        """Ask the event; where the device has failed, it is ``finish`` that raises."""
        try:
            return bool(mark.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def finish(self, mark: torch.cuda.Event) -> None:
        """Sleep until then."""
        mark.synchronize()

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


class _Run(NamedTuple):
    """Sections of one shard that are copied together, to ``start`` in a buffer."""

    shard: int
    sections: range
    start: int

    @property
    def units(self) -> list[tuple[int, int]]:
        """The run as the table names it."""
        return [(section, self.shard) for section in self.sections]

    def places(self, pattern: Pattern) -> list[int]:
        """Where its sections lie in the buffer."""
        first = pattern.sections[self.sections[0]].offset
        return [self.start + pattern.sections[n].offset - first for n in self.sections]


class _Jobs(NamedTuple):
    """A strip's table, how its fields are aligned, and the table's copy on the device."""

    strip: Strip
    aligned: tuple[int, ...]
    on_device: torch.Tensor


class _Work(NamedTuple):
    """A batch, its strips shaped for its way, and what its kernels share on the device."""

    batch: Batch
    strips: Sequence[Strip]
    programs: int
    blocks: torch.Tensor
    failed: torch.Tensor


class Running(NamedTuple):
    """A batch that was started, with all that the device still reads.

    ``failed``, in the host's memory, is not 0 if some values cannot be packed, once all has ended.
    """

    batch: Batch
    failed: torch.Tensor
    marks: tuple[Any, ...]


class Lane:
    """Runs batches in one direction. One thread at a time.

    Shards go one after the other, and of each the first layers first.
    Each of its two buffers has ``staging_bytes``, or the bytes of a section that is larger.
    """

    def __init__(self, queues: Queues, *, packs: bool, staging_bytes: int = STAGING_BYTES) -> None:
        self.queues = queues
        self._packs = packs
        self._staging_bytes = staging_bytes
        self._staging = torch.empty(0, dtype=torch.uint8)
        # What was last given to each buffer's queues.
        self._left: list[Any] = [None, None]
        self._slices = 0

    def start(self, batch: Batch, way: Way, after: Any) -> Generator[None, None, Running]:
        """Begin to move a batch once the marked work has ended; pauses slice by slice.

        While it pauses the device works on, and nothing else may be started here.
        Direct ways need payloads that kernels reach, and staged ones whole sections to store.
        Raises only when nothing of the batch is under way; what its targets hold is undefined then.
        """
        queues = self.queues
        queues.wait(after, copies=False)
        queues.wait(after, copies=True)
        told = torch.zeros(1, dtype=torch.int32, pin_memory=queues.device.type == "cuda")
        with ExitStack() as failing:
            failing.callback(lambda: self._wait(self._marks()))
            with queues.run(copies=False):
                failed = torch.zeros(1, dtype=torch.int32, device=queues.device)
                blocks = self._on_device(batch.blocks.reshape(-1))
            strips = [
                replace(strip, stripe=way.shaped(strip.stripe)) for strip in batch.pattern.strips
            ]
            work = _Work(batch, strips, way.programs, blocks, failed)
            yield from self._direct(work) if way.direct else self._staged(work)
            with queues.run(copies=False):
                told.copy_(failed, non_blocking=True)
            failing.pop_all()
        return Running(batch, told, self._marks())

    def ended(self, running: Running) -> bool:
        """Tell whether ``finish`` need not wait."""
        return all(self.queues.ended(mark) for mark in running.marks)

    def finish(self, running: Running) -> bool:
        """Wait until a batch has ended; False: some values cannot be packed.

        After False, what the batch's targets hold is undefined.
        """
        self._wait(running.marks)
        if self._packs:
            running.batch.zero_pads()
        return not running.failed.item()

    def _marks(self) -> tuple[Any, ...]:
        return tuple(self.queues.mark(copies=copies) for copies in (False, True))

    def _wait(self, marks: tuple[Any, ...]) -> None:
        for mark in marks:
            self.queues.finish(mark)

    def _direct(self, work: _Work) -> Iterator[None]:
        batch = work.batch
        offsets = [place.offset for place in batch.pattern.sections]
        for shards in _parts(len(batch.payloads)):
            units = [(section, shard) for section in range(len(offsets)) for shard in shards]
            bases = [int(batch.addresses[shard]) + offsets[section] for section, shard in units]
            self._launch(work, self._jobs(work, units, bases))
            yield

    def _staged(self, work: _Work) -> Iterator[None]:
        """Slice by slice, each in the buffer that the slice before the last has left.

        The first ones are small where no batch goes before: until the first has passed, one queue
        has nothing to do.
        """
        batch = work.batch
        half = max(self._staging_bytes, *(_lines(place.nbytes) for place in batch.pattern.sections))
        self._make_room(2 * half)
        idle = all(left is None or self.queues.ended(left) for left in self._left)
        for shards in _parts(len(batch.payloads)):
            small = half // _FIRST_SHARE if idle and not shards.start else half
            slices = list(_slices(batch.pattern, shards, small, half))
            buffers = [(self._slices + nth) % 2 for nth in range(len(slices))]
            starts = [self._staging.data_ptr() + half * buffer for buffer in buffers]
            units = [unit for runs in slices for run in runs for unit in run.units]
            bases = [
                start + place
                for start, runs in zip(starts, slices, strict=True)
                for run in runs
                for place in run.places(batch.pattern)
            ]
            jobs = self._jobs(work, units, bases)
            first_row = 0
            for buffer, runs in zip(buffers, slices, strict=True):
                layers = [batch.pattern.sections[n].layers for run in runs for n in run.sections]
                part = slice(first_row, first_row + sum(map(len, layers)))
                some = [one._replace(on_device=one.on_device[part]) for one in jobs]
                kernels = partial(self._launch, work, some)
                copies = partial(self._copy, batch, runs, half * buffer)
                self._left[buffer] = self._chain(kernels, copies, self._left[buffer])
                self._slices += 1
                first_row = part.stop
                yield

    def _make_room(self, nbytes: int) -> None:
        if self._staging.numel() < nbytes:
            if self._slices:
                self._wait(self._marks())  # The smaller buffers may be in use.
            with self.queues.run(copies=False):
                device = self.queues.device
                self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _jobs(
        self, work: _Work, units: Sequence[tuple[int, int]], bases: Sequence[int]
    ) -> list[_Jobs]:
        """Jobs of some units, uploaded together, with the units' sections at ``bases``."""
        with self.queues.run(copies=False):
            made: list[_Jobs] = []
            for strip in work.strips:
                table = work.batch.table(strip, units, bases)
                aligned = field_alignments(strip.stripe, table)
                made.append(_Jobs(strip, aligned, self._on_device(table)))
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

    def _copy(self, batch: Batch, runs: Sequence[_Run], start: int) -> None:
        """Copy runs between the host and the buffer that begins at ``start``."""
        with self.queues.run(copies=True):
            for run in runs:
                host = torch.frombuffer(batch.bytes_of(run.shard, run.sections), dtype=torch.uint8)
                begin = start + run.start
                staging = self._staging[begin : begin + host.numel()]
                if self._packs:
                    host.copy_(staging, non_blocking=True)
                else:
                    staging.copy_(host, non_blocking=True)

    def _launch(self, work: _Work, jobs: Sequence[_Jobs]) -> None:
        from kvtier_kernels.transfer.triton import launch

        with self.queues.run(copies=False):
            for one in jobs:
                launch(
                    one.strip.stripe,
                    one.strip.form,
                    work.batch.pattern.cut,
                    (one.on_device, one.aligned),
                    work.blocks,
                    work.failed,
                    packs=self._packs,
                    programs=work.programs,
                )

    def _on_device(self, numbers: Table) -> torch.Tensor:
        """A copy that does not wait for the device."""
        host = torch.from_numpy(numbers)
        if self.queues.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.queues.device, non_blocking=True)


def _parts(shards: int) -> Iterator[range]:
    """Cut a batch: while the device works on one part, the host lays out the next."""
    yield range(min(_FIRST_SHARDS, shards))
    for start in range(_FIRST_SHARDS, shards, _PART_SHARDS):
        yield range(start, min(start + _PART_SHARDS, shards))


def _slices(pattern: Pattern, shards: range, nbytes: int, nbytes_max: int) -> Iterator[list[_Run]]:
    """Fill buffers with runs of sections, shard by shard.

    The first with ``nbytes``, each next one with twice as much up to ``nbytes_max``, and any with
    a section at least, which that bounds.
    """
    runs: list[_Run] = []
    end = 0
    for shard in shards:
        sections = range(len(pattern.sections))
        while sections:
            counts = range(1, len(sections) + 1)
            fit = sum(pattern.span_bytes(sections[:count]) <= nbytes - end for count in counts)
            fit = fit if fit or end else 1
            run, sections = _Run(shard, sections[:fit], end), sections[fit:]
            if run.sections:
                runs.append(run)
                end = _lines(end + pattern.span_bytes(run.sections))
            if sections:
                yield runs
                runs, end, nbytes = [], 0, min(2 * nbytes, nbytes_max)
    yield runs


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
