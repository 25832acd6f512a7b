"""Objects of one credential in a cache: read from and written to its arena, without a copy.

As a keyed cache keeps payloads under foreign keys, so does this, in the same form. The difference
is who moves the bytes: here a socket reads from the slot and writes into it, so this is the worker
of its own plans. An object is stored with one byte behind it, because a payload has at least one.

::

    read    looked up ──► load ──► all sections verified in their slot ──► Held ──► released
    write   old one let go ──► slot reserved ──► Filling ──► committed or given up
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from kvtier.cache.cache import Cache
from kvtier.cache.keyed_transfer import Payload
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.planner import chunk_shape
from kvtier.codecs.opaque import opaque_codec, opaque_layout
from kvtier.interfaces import Clock
from kvtier.keys import foreign_key, tenant_digest
from kvtier.tiers.owned_memory import Region
from kvtier.types import Blocks, ChunkKey, MissReason, Move, Namespace, Plan, Result
from kvtier.wire import Status
from kvtier_server.turns import Turns

_SCHEME: Final = "kvtier objects 1"
_BEHIND: Final = b"\x01"
_BLOCKS: Final = Blocks(0, ((0,),), block_tokens=1)
_SIZE_TRIES: Final = 2
_PAUSE_S_MIN: Final = 0.0002
_PAUSE_S_MAX: Final = 0.005

#: What a miss is to a client.
_STATUSES: Final[dict[MissReason, Status]] = {
    MissReason.ABSENT: Status.ABSENT,
    MissReason.CODEC: Status.ABSENT,
    MissReason.CORRUPT: Status.ABSENT,
    MissReason.DEADLINE: Status.LATE,
    MissReason.NO_ROOM: Status.REFUSED,
    MissReason.QUOTA: Status.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where an object lies in an epoch; in the next one there is nothing."""

    root: bytes
    chunk: ChunkKey


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no object, or none can be kept."""

    status: Status
    text: str = ""


#: Whoever waits until fewer stores are under way; keys are bytes.
_ROOM: Final = "room"
_BUSY: Final = Fault(Status.LATE, "the object of that key was busy for too long")
_FULL: Final = Fault(Status.LATE, "too much was being written for too long")


class Held:
    """A verified object in its slot, which stays as it is until ``release``."""

    def __init__(
        self, arena: memoryview, offset: int, nbytes: int, end: Callable[[], None]
    ) -> None:
        #: Where it lies in the arena.
        self.offset = offset
        self.data = arena[offset : offset + nbytes]
        self._end: Callable[[], None] | None = end

    def release(self) -> None:
        """Let the slot go; ``data`` is not to be used any more. A second call does nothing."""
        if self._end is not None:
            end, self._end = self._end, None
            self.data = self.data[:0]
            end()


class Filling:
    """A slot for a new object. Fill ``data``, then ``commit``; or ``abort``, at any time before."""

    def __init__(self, cache: Cache, plan: Plan, slot: memoryview) -> None:
        self._cache = cache
        self._plan: Plan | None = plan
        self._slot = slot
        self.data = slot[: -len(_BEHIND)]

    def commit(self) -> None:
        """Let readers have the object. Does nothing after ``abort``."""
        if self._plan is not None:
            self._slot[-len(_BEHIND) :] = _BEHIND
        self._end(ok=True)

    def abort(self) -> None:
        """Give the slot back. Does nothing after ``commit``."""
        self._end(ok=False)

    def _end(self, *, ok: bool) -> None:
        if self._plan is not None:
            _answer(self._cache, self._plan, ok=ok)
            self._plan = None
            self._slot = self.data = self._slot[:0]


class Objects:
    """The objects of one namespace. Its methods belong to one event loop; none blocks it."""

    def __init__(
        self, cache: Cache, namespace: Namespace, clock: Clock, turns: Turns | None = None
    ) -> None:
        """``turns`` are those of all who write to the cache."""
        self._cache = cache
        self._turns = Turns() if turns is None else turns
        self._namespace = namespace
        self._owner = tenant_digest(namespace.tenant_salt)
        self._clock = clock
        #: The file that what was leased lies in; None: nothing was.
        self.region: Region | None = None

    async def contains(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """Tell which keys have an object; what is not known by the deadline has none."""
        return [bool(await self._codec_of(self.address(key), deadline)) for key in keys]

    def address(self, key: bytes) -> Address:
        """Return where the object of a client's key lies now."""
        root = self._cache.root(self._namespace)
        return Address(root, foreign_key(root, _SCHEME, key))

    async def read(self, key: bytes, *, deadline: float) -> Held | Fault:
        """Hold an object, which is brought up for it. The caller releases what it gets."""
        return await self.bring(self.address(key), deadline=deadline)

    async def lease(self, key: bytes, *, deadline: float) -> Held | Fault:
        """As ``read``, where the object lies in ``region``, at the arena's own offsets."""
        held = await self.read(key, deadline=deadline)
        return held if isinstance(held, Fault) else self.leased(held)

    def hold(self, address: Address) -> Held | None:
        """Hold an object that lies in memory; None: ``bring`` may bring it up."""
        hold = self._cache.hold(self._payload(address, None))
        if hold is None:
            return None
        place = _place_in_slot(hold.codec)
        if place is None:
            hold.release()
            return None
        start, nbytes = place
        return Held(self._cache.arena, hold.slot.offset + start, nbytes, hold.release)

    async def bring(self, address: Address, *, deadline: float) -> Held | Fault:
        """Do what ``read`` does, with the object at an address."""
        if (held := self.hold(address)) is not None:
            return held
        found: Held | MissReason = MissReason.CODEC
        for attempt in range(_SIZE_TRIES):
            match = await self._match(self._payload(address, None), deadline)
            codec = _codec_in(match)
            if codec is None or opaque_codec(codec) is None:
                if match is not None:
                    self._cache.note_admission(match, 0, 1)
                return Fault(Status.ABSENT)
            found = await self._load(
                self._payload(address, _size_of(codec)), deadline, count=attempt == 0
            )
            # A remote tells an object's size in its header alone, and that has been read now.
            if found is not MissReason.CODEC:
                break
        if isinstance(found, Held):
            return found
        status = _STATUSES.get(found, Status.UNAVAILABLE)
        return Fault(status, "" if status is Status.ABSENT else found.value)

    def leased(self, held: Held) -> Held | Fault:
        """Return what is held if its client may map where it lies; else it is let go."""
        region = self._cache.region_at(held.offset)
        if region is None or region.owner != self._owner:
            held.release()
            return Fault(Status.UNAVAILABLE, "it lies where nobody may map it")
        self.region = region
        return held

    async def _load(self, payload: Payload, deadline: float, *, count: bool) -> Held | MissReason:
        match = await self._match(payload, deadline)
        if match is None or not match.hits:
            return MissReason.DEADLINE if match is None else MissReason.ABSENT
        if count:
            self._cache.note_admission(match, 0, 1)
        load = self._cache.begin_load(match, _BLOCKS, deadline=deadline)
        if load is None:
            return MissReason.ABSENT
        try:
            plan = await self._arrived(load)
        except asyncio.CancelledError:
            load.cancel()
            raise
        if isinstance(plan, MissReason):
            return plan
        move = plan.moves[0]
        start = move.slot.offset + move.payload_offset
        nbytes = _size_of(move.codec) - len(_BEHIND)
        return Held(self._cache.arena, start, nbytes, partial(_answer, self._cache, plan))

    async def reserve(self, key: bytes, nbytes: int, *, deadline: float) -> Filling | Fault:
        """Make room for a new object; the old one is gone from now on.

        Writers of one key, and whoever waits for room, go on in the order in which they came.
        """
        payload = self._payload(self.address(key), nbytes + len(_BEHIND))
        if not await self._turns.take(payload.key, self._left_s(deadline)):
            return _BUSY
        try:
            return await self._replaced(payload, deadline)
        finally:
            self._turns.give(payload.key)

    async def _replaced(self, payload: Payload, deadline: float) -> Filling | Fault:
        pause_s = _PAUSE_S_MIN
        while True:
            if self._cache.remove([payload.key])[0]:
                if not await self._turns.take(_ROOM, self._left_s(deadline)):
                    return _FULL
                try:
                    outcome = await self._begun(payload, deadline)
                finally:
                    self._turns.give(_ROOM)
                if outcome is not None:
                    return outcome
            # It is being filled, for somebody else or from below, or is on its way to disk.
            if self._clock.now() >= deadline:
                return _BUSY
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _begun(self, payload: Payload, deadline: float) -> Filling | Fault | None:
        """Begin to store, when there is room; None: something of that key is there again."""
        pause_s = _PAUSE_S_MIN
        while True:
            plan = self._cache.begin_store(payload, range(1), _BLOCKS)
            if plan is not None:
                move = plan.moves[0]
                start = move.slot.offset + move.payload_offset
                slot = self._cache.arena[start : start + _size_of(move.codec)]
                return Filling(self._cache, plan, slot)
            if payload.refused is None:
                return None
            if payload.refused not in {MissReason.UNAVAILABLE, MissReason.CROWDED}:
                return Fault(Status.REFUSED, f"no room for it: {payload.refused.value}")
            if self._clock.now() >= deadline:
                return _FULL
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _left_s(self, deadline: float) -> float:
        return deadline - self._clock.now()

    async def delete(self, keys: Sequence[bytes], *, deadline: float) -> bool:
        """Forget objects; False: by the deadline some could not go."""
        chunks = [self.address(key).chunk for key in keys]
        return await self.let_go(chunks, deadline=deadline)

    async def let_go(self, chunks: Iterable[ChunkKey], *, deadline: float) -> bool:
        """Do the same with the objects at some addresses."""
        left = list(chunks)
        pause_s = _PAUSE_S_MIN
        while True:
            gone = self._cache.remove(left)
            left = [key for key, is_gone in zip(left, gone, strict=True) if not is_gone]
            if not left or self._clock.now() >= deadline:
                return not left
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _payload(self, address: Address, nbytes: int | None) -> Payload:
        return Payload(self._namespace, address.root, address.chunk, nbytes)

    async def _codec_of(self, address: Address, deadline: float) -> str | None:
        """Return what says an object's size; None where there is no object."""
        return _codec_in(await self._match(self._payload(address, None), deadline))

    async def _match(self, payload: Payload, deadline: float) -> Ready | None:
        """Look up an object; None: a tier that may hold it does not answer in time."""
        pause_s = _PAUSE_S_MIN
        while isinstance(match := self._cache.match(payload), Pending):
            if self._clock.now() >= deadline:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return match

    async def _arrived(self, load: Load) -> Plan | MissReason:
        """Wait for all sections; return the plan whose answer lets the slot go.

        The others are answered as they come: only the last one has to hold the slot.
        """
        sections, pause_s = 0, _PAUSE_S_MIN
        while True:
            for plan in load.poll():
                move = plan.moves[0]
                sections += sum(each.section_count for each in plan.moves)
                if sections == move.layout.sections:
                    return plan
                _answer(self._cache, plan)
            if load.outcome is not None:
                misses = load.outcome.misses
                return misses[0].reason if misses else MissReason.ABSENT
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def namespace_of(credential: str) -> Namespace:
    """Return the namespace of a credential's objects; it is a tenant of its own."""
    return Namespace(_SCHEME, opaque_layout(1), tenant_salt=credential)


def _codec_in(match: Ready | None) -> str | None:
    return match.hits[0].codec if match is not None and match.hits else None


@lru_cache(maxsize=1024)
def _place_in_slot(codec: str) -> tuple[int, int] | None:
    """Return where an object begins in its slot and its bytes; None: no object is packed so."""
    opaque = opaque_codec(codec)
    if opaque is None:
        return None
    (geometry,) = chunk_shape(opaque.layout, opaque, chunk=0).geometries.values()
    return geometry.header_bytes, _size_of(codec) - len(_BEHIND)


def _size_of(codec: str) -> int:
    return int(codec.rpartition("-")[2])


def _answer(cache: Cache, plan: Plan, *, ok: bool = True) -> None:
    reason = None if ok else MissReason.CANCELLED
    move: Move = plan.moves[0]
    cache.finish([Result(plan.plan_id, move.worker, ok=ok, reason=reason)])
