"""The doors of KVTier: small protocols, every method required, no flags.

A new ability is a new protocol, or a decorator that has the same protocol. Nothing here imports
torch; a pool hands its memory over through DLPack.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from kvtier.errors import ConnectorError
from kvtier.types import (
    ChunkKey,
    CodecTraits,
    Entry,
    Features,
    KeyInfo,
    Move,
    Part,
    ReadRequest,
    ShardLayout,
    WriteItem,
)

#: One read's outcome: the number of bytes placed in the buffer, None for a miss, or the error.
ReadOutcome = int | None | ConnectorError


@runtime_checkable
class Loan(Protocol):
    """A whole object, to be read where its store has it. Any thread may use it."""

    @property
    def view(self) -> memoryview:
        """Its bytes, for reading only. They may change once the loan has ended, and never fault."""
        ...

    @property
    def holds(self) -> bool:
        """True while the bytes are those that were lent. What was read before it says so counts."""
        ...

    def release(self) -> None:
        """Give it back, once. Waits for nothing."""
        ...


#: What comes of asking for a loan: None where there is no such object; what is not lent, but may
#: be read, is a ``ConnectorRefusedError``.
LendOutcome = Loan | None | ConnectorError


@runtime_checkable
class Connector(Protocol):
    """Moves opaque bytes to one medium. Order is preserved; one outcome per key.

    Batches only, async at this edge only. A missing key is a value (``False``, ``None``); a fault
    is an outcome, so one bad key never hides the others. Methods never raise for a fault of the
    medium. A connector knows nothing of capacity, eviction or models.
    """

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key whether an object lies there now."""
        ...

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill ``into[i]`` (the caller's, exactly ``nbytes`` long) with what ``requests[i]`` names.

        The connector does not touch a buffer after it has returned. After an outcome other than
        the full size, the buffer's content is undefined.
        """
        ...

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Store whole objects; a reader sees the old object, the new one or none, never a part."""
        ...

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove what is there. A missing key is not an error."""
        ...

    async def close(self) -> None:
        """Release everything; a second call does nothing."""
        ...


@runtime_checkable
class Listable(Protocol):
    """A connector that can tell what it holds, for a sole writer after a restart."""

    def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """Iterate over the objects whose key starts with ``prefix``, in no particular order."""
        ...


@runtime_checkable
class Lending(Protocol):
    """A connector to a store on this host that lets its memory be read where it lies."""

    async def lend(self, keys: Sequence[bytes]) -> list[LendOutcome]:
        """Borrow whole objects, one outcome per key. Each loan is the caller's to release.

        When it is cancelled it has released what it got.
        """
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Pure bookkeeping of one tier: no I/O, no lock, no clock.

    The policy decides by bytes and evicts leaves first: a victim's children *in this tier* are
    victims before it. Pinned chunks (a predicate given at construction) are never victims.
    """

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """Take an entry in and name the victims, in the order in which they must leave.

        None refuses the entry and changes nothing: it cannot fit even when all that may leave has
        left. Victims are forgotten at once; a victim is never the entry or one of its ancestors.
        The caller promises that ``entry.key`` is not held.
        """
        ...

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """Note an access. A key that is not held is ignored."""
        ...

    def remove(self, key: ChunkKey) -> None:
        """Forget an entry that left for another reason. A key that is not held is ignored."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Decides what is worth a write to a tier that wears out. Pure: no I/O, no lock, no clock.

    Separate from eviction: what is refused here stays in the tier above and may be offered again.
    """

    def offer(self, entry: Entry, now: float) -> bool:
        """Decide whether a chunk of the tier above is written below; True counts as written.

        Asked when the chunk is stored above and at each later access while the tier below does
        not hold it; parents before children. The entry's features are those of that access.
        """
        ...

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """Note an access to a chunk that the tier below holds."""
        ...

    def left(self, key: ChunkKey, now: float) -> None:
        """Note that the tier below gave a chunk up."""
        ...


@runtime_checkable
class PagedPool(Protocol):
    """What a codec needs to know of an engine's pool; no torch in its types.

    The pool owns its memory; a view is valid as long as the pool lives.
    """

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        ...

    @property
    def block_count(self) -> int:
        """Blocks per KV group; ids run from 0."""
        ...

    @property
    def stream(self) -> int:
        """The CUDA stream on which the pool's blocks are written; 0 on a CPU."""
        ...

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        """Return a view ``[block_count, block_tokens, kv_heads, dim]`` of one layer's K or V.

        ``layer`` counts within the group. Any strides with a dense last dimension. The object
        is a ``torch.Tensor`` or speaks DLPack.
        """
        ...


@runtime_checkable
class BlockCodec(Protocol):
    """Paged pool to packed shard and back, where the KV lies.

    Works section by section. ``pack`` and ``unpack`` release the GIL for the bulk of their work
    and return when the bytes are in place.
    """

    @property
    def name(self) -> str:
        """The name that stands in headers; with a calibration, it says which."""
        ...

    @property
    def traits(self) -> CodecTraits:
        """What the tiers must know of it."""
        ...

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Packed size of one section before padding to 4096."""
        ...

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        """Write the move's sections into ``payload``, which starts at section 0 of the slot.

        What lies behind each, before the next, becomes zero: the slot may have held another chunk.
        """
        ...

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        """Write the move's tokens and heads into the pool's blocks, and nothing else."""
        ...


@runtime_checkable
class ByteCodec(Protocol):
    """Bytes to fewer bytes and back, for tiers below DRAM; knows nothing of planes or headers.

    Lossless. Every size is known before anything is allocated. Both ways may run in several
    threads at once, and release the GIL for the bulk of their work.
    """

    @property
    def name(self) -> str:
        """The name that stands in what a tier stores and on command lines."""
        ...

    def encoded_bytes_max(self, nbytes: int) -> int:
        """The most that ``nbytes`` bytes can become."""
        ...

    def encode(self, source: memoryview, value_bytes: int, into: memoryview) -> int:
        """Encode ``source`` into the start of ``into`` and return how many bytes it took.

        ``source`` is a whole number of floats ``value_bytes`` wide, as a raw shard's sections are;
        1 stands for bytes of any meaning. ``into`` is the caller's, ``encoded_bytes_max`` long.
        """
        ...

    def decode(self, source: memoryview, into: memoryview) -> None:
        """Fill ``into``, the caller's, with what was encoded into the bytes of ``source``.

        Raises ``CodecError`` for what ``encode`` did not make and where ``into`` is not exactly as
        long as the bytes encoded; ``into`` is then undefined.
        """
        ...


@runtime_checkable
class Clock(Protocol):
    """Time as a parameter, so that tests need no sleeping."""

    def now(self) -> float:
        """Seconds, monotonic, comparable between processes of one host."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        ...
