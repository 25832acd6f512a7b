"""A chunk in a remote, as a fill reads it: ranges of its objects, straight into DRAM slots."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.cache.below.borrowed import Borrowing
from kvtier.cache.below.fill import (
    Arriving,
    Hold,
    NotLentError,
    ObjectGoneError,
    Origin,
    UnwantedError,
)
from kvtier.cache.executor import Executor, Fault
from kvtier.codecs.opaque import opaque_codec
from kvtier.constants import REMOTE_STEPS_AHEAD
from kvtier.errors import (
    ConnectorDataError,
    ConnectorTimeoutError,
    DeadlineError,
    FormatError,
    KVTierError,
    MissingExtraError,
    RegistryError,
    ShardError,
)
from kvtier.keys import shard_key
from kvtier.tiers.arrival import Step
from kvtier.tiers.decoding import ByteCodecs
from kvtier.tiers.health import is_slow
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.incoming import Incoming, OtherCodecError, Part
from kvtier.tiers.remote.tier import RemoteTier
from kvtier.tiers.scratch import Scratch
from kvtier.types import MissReason, ReadRequest, ShardId


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """One remote: its books, the way to it, and what decodes what comes from there."""

    tier: RemoteTier
    channel: Channel
    codecs: ByteCodecs = field(default_factory=ByteCodecs)
    scratch: Scratch = field(default_factory=Scratch)


class NoHold:
    """A remote keeps nothing for anybody: a read may find that a chunk has gone."""

    def release(self) -> None:
        """Do nothing."""


class RemoteSource:
    """A ``Source`` over the objects of one chunk."""

    def __init__(self, remote: Remote, origin: Origin, executor: Executor) -> None:
        self._remote = remote
        self._tier = remote.tier
        self._channel = remote.channel
        self._origin = origin._replace(lendable=remote.channel.lends and remote.tier.lends)
        self._executor = executor
        self._fetched: _Fetch | Borrowing | None = None
        self._begun = self._deadline = 0.0
        self._nbytes = 0
        self._blamed = False

    @property
    def origin(self) -> Origin:
        """What is believed to be there; once it was read, with the bytes that it has there."""
        read_bytes = self._fetched.stored_bytes if self._fetched is not None else None
        return self._origin._replace(stored_bytes=read_bytes)

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
        fetch: _Fetch | Borrowing
        if arriving.slots:
            fetch = _Fetch(self._remote, arriving, deadline)
        else:
            fetch = Borrowing(self._channel, arriving, deadline)
        self._fetched = fetch
        self._begun, self._deadline = self._executor.now(), deadline
        self._nbytes = sum(each.geometry.shard_bytes for each in arriving.expected.values())
        self._executor.watch(self._channel.submit(fetch.run()), done, deadline=deadline, late=late)

    def settle(self, outcome: Fault | None) -> MissReason | None:
        """Tell the remote's books how it did; what is of no use there is deleted."""
        tier, origin = self._tier, self._origin
        if outcome is None:
            tier.succeeded()
            tier.shrinks = self.origin.stored_bytes is not None
            self._learn(origin.codec)
            return None
        if isinstance(outcome, OtherCodecError):
            tier.succeeded()
            self._learn(outcome.codec)
            tier.learn_chunk_codec(origin.key, outcome.codec)
            return MissReason.CODEC
        if isinstance(outcome, MissingExtraError | RegistryError):  # What encoded it is not here.
            tier.succeeded()
            return MissReason.CODEC
        if isinstance(outcome, NotLentError):  # Whoever waits has it copied instead.
            tier.lend_no_more()
            return MissReason.CANCELLED
        if isinstance(outcome, ObjectGoneError):
            tier.succeeded()
            tier.lose(origin.key)
            return MissReason.ABSENT
        if isinstance(outcome, ShardError):
            tier.succeeded()
            tier.lose(origin.key)
            keys = [shard_key(origin.key, shard) for shard in origin.shards]
            self._channel.submit(self._channel.delete(keys))
            return MissReason.CORRUPT
        if isinstance(outcome, ConnectorDataError):  # Another key's, perhaps: not for us to delete.
            tier.spoil(origin.key)
            tier.failed(outcome)
            return MissReason.CORRUPT
        if isinstance(outcome, DeadlineError):
            tier.late_count += 1
            self._blame(outcome)
            return MissReason.DEADLINE
        # The caller's time may have been over before a call was begun.
        late = isinstance(outcome, ConnectorTimeoutError)
        if late and self._executor.now() >= self._deadline:
            self._blame(outcome)
            return MissReason.DEADLINE
        tier.failed(outcome)
        return MissReason.IO_ERROR

    def end_late(self) -> None:
        """One overdue read less; how long it took is known now."""
        self._tier.late_count -= 1
        self._blame(DeadlineError("no answer in time"))

    def _blame(self, fault: Fault) -> None:
        """Have an overdue read count against the remote, once, if that was slow with it.

        Each call that lasts for longer than the remote's own deadline counts besides.
        """
        waited_s = self._executor.now() - self._begun
        if not self._blamed and is_slow(waited_s, self._nbytes):
            self._blamed = True
            self._tier.failed(fault)

    def _learn(self, codec: str) -> None:
        """Take in what others of the namespace may be packed with; a payload says its own."""
        if opaque_codec(codec) is None:
            self._tier.learn_codec(self._origin.namespace, codec)
        else:
            self._tier.learn_chunk_codec(self._origin.key, codec)


class _Fetch:
    """Reads all shards of a chunk, the first sections of each before any later ones."""

    def __init__(self, remote: Remote, arriving: Arriving, deadline: float) -> None:
        self._channel = remote.channel
        self._arriving = arriving
        self._deadline = deadline
        self._incoming = {
            shard: Incoming(
                slot,
                arriving.expected[shard],
                remote.codecs,
                remote.scratch,
                shrinks=remote.tier.shrinks,
            )
            for shard, slot in arriving.slots.items()
        }
        self._coming: deque[tuple[ShardId, Part, asyncio.Task[int | None]]] = deque()

    @property
    def stored_bytes(self) -> int | None:
        """The bytes that were read, where any shard was encoded; once ``run`` has returned."""
        found = [incoming.stored_bytes for incoming in self._incoming.values()]
        if not any(found):
            return None
        sealed = (len(slot) for slot in self._arriving.slots.values())
        return sum(nbytes or whole for nbytes, whole in zip(found, sealed, strict=True))

    async def run(self) -> None:
        """Return once all is verified; raise the first fault once nothing touches the slots.

        A few steps are asked for ahead of the one that is verified, so that the way is never idle.
        """
        try:
            fault = await self._run()
        finally:
            if self._coming:  # A bug has ended it: what was begun still writes to the slots.
                await asyncio.wait([read for _, _, read in self._coming])
            for incoming in self._incoming.values():
                incoming.end()
        if fault is None and not all(incoming.whole for incoming in self._incoming.values()):
            fault = FormatError("an object ends before its last section")
        if fault is not None:
            raise fault

    async def _run(self) -> Fault | None:
        fault: Fault | None = None
        left = deque(self._steps())
        while self._coming or (left and fault is None):
            while left and fault is None and len(self._coming) < REMOTE_STEPS_AHEAD:
                shard, step = left[0]
                incoming = self._incoming[shard]
                if incoming.waits and step.start:
                    break
                if not self._arriving.wanted():
                    fault = UnwantedError("nobody waits for this chunk")
                    break
                left.popleft()
                part = incoming.begin(step)
                if part is not None:
                    read = asyncio.get_running_loop().create_task(self._read(shard, part))
                    self._coming.append((shard, part, read))
            if self._coming:
                found = await self._take(*self._coming.popleft(), verify=fault is None)
                fault = fault or found
        return fault

    def _steps(self) -> list[tuple[ShardId, Step]]:
        steps = [
            (number, shard, step)
            for shard, incoming in self._incoming.items()
            for number, step in enumerate(incoming.steps)
        ]
        return [(shard, step) for _, shard, step in sorted(steps, key=lambda each: each[0])]

    async def _read(self, shard: ShardId, part: Part) -> int | None:
        key = shard_key(self._arriving.expected[shard].chunk, shard)
        request = ReadRequest(key, part.step.start, len(part.into))
        return await self._channel.read(request, part.into, deadline=self._deadline)

    async def _take(
        self, shard: ShardId, part: Part, read: asyncio.Task[int | None], *, verify: bool
    ) -> Fault | None:
        """Wait for a part and verify it; return what is wrong with it."""
        incoming = self._incoming[shard]
        try:
            count = await self._count(incoming, part, read)
            if verify:
                sections = await self._channel.run(lambda: incoming.take(part, count))
                self._arriving.progress(shard, sections)
        except (OSError, KVTierError) as error:
            return error
        return None

    async def _count(self, incoming: Incoming, part: Part, read: asyncio.Task[int | None]) -> int:
        """Wait for a read; what it comes to behind the object's end is of no account."""
        try:
            count = await read
        except (OSError, KVTierError):
            if incoming.needs(part):
                raise
            return 0
        if count is None and incoming.needs(part):
            raise ObjectGoneError(errno.ENOENT, "no such object")
        return count or 0
