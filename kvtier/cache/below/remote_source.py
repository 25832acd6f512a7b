"""A chunk in a remote, as a fill reads it: ranges of its objects, straight into DRAM slots."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.cache.below.fill import Arriving, Hold, Origin, UnwantedError
from kvtier.cache.executor import Executor, Fault
from kvtier.codecs.opaque import opaque_codec
from kvtier.constants import REMOTE_STEP_BYTES, REMOTE_STEPS_AHEAD
from kvtier.errors import (
    ConnectorDataError,
    DeadlineError,
    FormatError,
    IdentityError,
    KVTierError,
    ShardError,
)
from kvtier.keys import shard_key
from kvtier.shard_format import parse_header
from kvtier.tiers.arrival import Arrival, Expected, Step, read_steps
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.tier import RemoteTier
from kvtier.types import MissReason, ReadRequest, ShardId


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """One remote: its books and the way to it."""

    tier: RemoteTier
    channel: Channel


class _NotThereError(FileNotFoundError):
    """An object that the remote was said to hold is not there."""


class _OtherCodecError(IdentityError):
    """The chunk that was asked for, packed with another codec."""

    def __init__(self, codec: str) -> None:
        super().__init__(f"codec is {codec!r}")
        self.codec = codec


class NoHold:
    """A remote keeps nothing for anybody: a read may find that a chunk has gone."""

    def release(self) -> None:
        """Do nothing."""


class RemoteSource:
    """A ``Source`` over the objects of one chunk."""

    def __init__(self, remote: Remote, origin: Origin, executor: Executor) -> None:
        self._tier = remote.tier
        self._channel = remote.channel
        self._origin = origin
        self._executor = executor

    @property
    def origin(self) -> Origin:
        """What is believed to be there."""
        return self._origin

    def hold(self) -> Hold:
        """Keep it from being evicted, where that is ours to decide."""
        holdings = self._tier.holdings
        record = holdings.index.ready(self._origin.key) if holdings is not None else None
        if holdings is None or record is None:
            return NoHold()
        return holdings.index.lease([record])

    def fetch(
        self,
        arriving: Arriving,
        done: Callable[[Fault | None], None],
        *,
        deadline: float,
        late: Callable[[Fault | None], None],
    ) -> None:
        """Read and verify in the channel's loop and threads."""
        work = _Fetch(self._channel, arriving, deadline).run()
        self._executor.watch(self._channel.submit(work), done, deadline=deadline, late=late)

    def settle(self, outcome: Fault | None) -> MissReason | None:
        """Tell the remote's books how it did; what is of no use there is deleted."""
        tier, origin = self._tier, self._origin
        if outcome is None:
            tier.succeeded()
            self._learn(origin.codec)
            return None
        if isinstance(outcome, _OtherCodecError):
            tier.succeeded()
            self._learn(outcome.codec)
            return MissReason.CODEC
        if isinstance(outcome, _NotThereError):
            tier.succeeded()
            tier.lose(origin.key)
            return MissReason.ABSENT
        if isinstance(outcome, ShardError):
            tier.succeeded()
            tier.lose(origin.key)
            keys = [shard_key(origin.key, shard) for shard in origin.shards]
            self._channel.submit(self._channel.delete(keys))
            return MissReason.CORRUPT
        if isinstance(outcome, ConnectorDataError):
            tier.lose(origin.key)
            tier.failed(outcome)
            return MissReason.CORRUPT
        tier.failed(outcome)
        if isinstance(outcome, DeadlineError):
            tier.late_count += 1
            return MissReason.DEADLINE
        return MissReason.IO_ERROR

    def end_late(self) -> None:
        """One overdue read less."""
        self._tier.late_count -= 1

    def _learn(self, codec: str) -> None:
        """Take in what others of the namespace may be packed with; a payload says its own."""
        if opaque_codec(codec) is None:
            self._tier.learn_codec(self._origin.namespace, codec)
        else:
            self._tier.learn_payload_codec(self._origin.key, codec)


class _Fetch:
    """Reads all shards of a chunk, the first sections of each before any later ones."""

    def __init__(self, channel: Channel, arriving: Arriving, deadline: float) -> None:
        self._channel = channel
        self._arriving = arriving
        self._deadline = deadline
        self._arrivals = {
            shard: Arrival(slot, arriving.expected[shard]) for shard, slot in arriving.slots.items()
        }
        self._coming: deque[tuple[ShardId, Step, asyncio.Task[int | None]]] = deque()

    async def run(self) -> None:
        """Return once all is verified; raise the first fault once nothing touches the slots.

        A few steps are asked for ahead of the one that is verified, so that the way is never idle.
        """
        fault: Fault | None = None
        left = deque(self._steps())
        while self._coming or (left and fault is None):
            while left and fault is None and len(self._coming) < REMOTE_STEPS_AHEAD:
                if not self._arriving.wanted():
                    fault = UnwantedError("nobody waits for this chunk")
                    break
                shard, step = left.popleft()
                read = asyncio.get_running_loop().create_task(self._read(shard, step))
                self._coming.append((shard, step, read))
            if self._coming:
                found = await self._take(*self._coming.popleft(), verify=fault is None)
                fault = fault or found
        if fault is not None:
            raise fault

    def _steps(self) -> list[tuple[ShardId, Step]]:
        steps = [
            (number, shard, step)
            for shard, expected in self._arriving.expected.items()
            for number, step in enumerate(read_steps(expected.geometry, REMOTE_STEP_BYTES))
        ]
        return [(shard, step) for _, shard, step in sorted(steps, key=lambda each: each[0])]

    async def _read(self, shard: ShardId, step: Step) -> int | None:
        key = shard_key(self._arriving.expected[shard].chunk, shard)
        request = ReadRequest(key, step.start, step.end - step.start)
        into = self._arriving.slots[shard][step.start : step.end]
        return await self._channel.read(request, into, deadline=self._deadline)

    async def _take(
        self, shard: ShardId, step: Step, read: asyncio.Task[int | None], *, verify: bool
    ) -> Fault | None:
        """Wait for a step and verify it; return what is wrong with it."""
        try:
            count = await read
            if count is None:
                raise _NotThereError(errno.ENOENT, "no such object")
            if verify:
                await self._channel.run(lambda: self._verify(shard, step, count))
                self._arriving.progress(shard, step.sections.stop)
        except (OSError, KVTierError) as error:
            return error
        return None

    def _verify(self, shard: ShardId, step: Step, count: int) -> None:
        expected, slot = self._arriving.expected[shard], self._arriving.slots[shard]
        if step.start == 0 and count >= expected.geometry.header_bytes:
            _raise_for_other_codec(slot, expected)
        if count < step.end - step.start:
            raise FormatError(f"an object ends before byte {step.end}")
        self._arrivals[shard].take(step)


def _raise_for_other_codec(slot: memoryview, expected: Expected) -> None:
    """Tell the right chunk in another codec, which has other sizes, from a wrong one."""
    header = parse_header(slot[: expected.geometry.header_bytes])
    same = (header.chunk, header.shard, header.namespace) == (
        expected.chunk,
        expected.shard,
        expected.namespace,
    )
    if same and header.codec != expected.codec:
        raise _OtherCodecError(header.codec)
