"""A cache for plugs that know only foreign keys: opaque payloads, in batches.

A face over ``Cache``: the same arena, disk and remote, policies, format, write-through and
verification, shared with whatever else the cache holds. A payload has no parent and no child.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from kvtier.cache.cache import Cache
from kvtier.cache.keyed_desk import Desk
from kvtier.cache.keyed_transfer import Get, Item, Payload, Put, Transfer
from kvtier.cache.match import Pending
from kvtier.clock import SystemClock
from kvtier.codecs.opaque import Pieces
from kvtier.constants import (
    KEYED_BATCH_MAX,
    KEYED_PIECES_MAX,
    KEYED_TRANSFERS_MAX,
    LOAD_DEADLINE_S_DEFAULT,
    STORE_DEADLINE_S,
)
from kvtier.errors import LayoutError
from kvtier.interfaces import Clock
from kvtier.keys import foreign_key
from kvtier.types import MissReason, Namespace

Buffer = memoryview | bytearray | bytes

#: A payload in memory: in one piece, or as a tuple of pieces, one after another.
Source = Buffer | tuple[Buffer, ...]
Target = memoryview | bytearray | tuple[memoryview | bytearray, ...]


def _nobody_listens() -> None:
    pass


class KeyedCache:
    """Payloads under another system's keys. Any thread may call; no call waits for a tier.

    A key names one payload for as long as that is held: a put under a key that is held does
    nothing. Keys of two namespaces, or of two schemes, never meet. Faults of a tier are outcomes;
    only a caller's mistake raises. ``close`` it before the cache.
    """

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        scheme: str,
        *,
        clock: Clock | None = None,
        stirred: Callable[[], None] = _nobody_listens,
    ) -> None:
        """Begin to use a cache.

        ``namespace`` says what computed the KV, as everywhere. ``scheme`` says whose keys these
        are and what its payloads hold: all that the foreign key does not say and on which the
        bytes depend, as page size, layout, rank and the system's version. ``clock`` is the
        cache's. ``stirred`` is called in a thread of ours, soon after a payload was copied: whoever
        polls now finds news. It neither blocks nor raises.
        """
        self._cache = cache
        self._namespace = namespace
        self._scheme = scheme
        self._clock = clock or SystemClock()
        self._desk = Desk(cache, namespace, self._clock, stirred)
        self._transfers: set[Transfer] = set()
        self._closed = False
        self._lock = threading.Lock()

    def put(
        self, items: SequenceOf[tuple[bytes, Source]], *, deadline: float | None = None
    ) -> Transfer:
        """Begin to store payloads; the outcome of each is the tier that holds it, or why none does.

        A payload that is held under another size is replaced. Raises ``LayoutError`` for too many
        items or a payload of no or too many bytes or of too many pieces, and ``ConfigError`` for a
        key of no or too many bytes.
        """
        buffers = [_pieces(data) for _, data in items]
        payloads = self._payloads([key for key, _ in items], (each.nbytes for each in buffers))
        puts = [Put(self._desk, *each) for each in zip(payloads, buffers, strict=True)]
        return self._begin(puts, STORE_DEADLINE_S, deadline)

    def get(
        self,
        keys: SequenceOf[bytes],
        into: SequenceOf[Target],
        *,
        deadline: float | None = None,
    ) -> Transfer:
        """Begin to fill buffers; the outcome of each is the tier that gave it, or why none did.

        ``into[i]`` is writable and exactly as long as the payload: one that is held under another
        size is absent. Raises as ``put`` does, and ``LayoutError`` for a buffer that cannot be
        written to.
        """
        if len(keys) != len(into):
            raise LayoutError(f"{len(keys)} keys and {len(into)} buffers")
        buffers = [_pieces(target) for target in into]
        if any(buffer.readonly for buffer in buffers):
            raise LayoutError("a buffer to read into cannot be written to")
        payloads = self._payloads(keys, (each.nbytes for each in buffers))
        gets = [Get(self._desk, *each) for each in zip(payloads, buffers, strict=True)]
        return self._begin(gets, LOAD_DEADLINE_S_DEFAULT, deadline)

    def contains(self, keys: SequenceOf[bytes]) -> list[bool | None]:
        """Tell which keys are held, of whatever size; prolongs nothing.

        None: a tier that may hold it cannot answer yet. Ask again. Raises as ``put`` does.
        """
        return [self._held(payload) for payload in self._payloads(keys)]

    def delete(self, keys: SequenceOf[bytes]) -> None:
        """Forget payloads; from now on they are not found. Raises as ``put`` does.

        A get that is under way may still give what it found. Files are unlinked in the
        background, and a remote is asked to delete, unconfirmed: after a crash, or in a remote
        that was away, they may be found again. To forget everything for good, invalidate the
        namespace.
        """
        self._desk.doom([payload.key for payload in self._payloads(keys)])

    def close(self) -> None:
        """End all transfers and the thread that copies; the cache goes on. Once is enough.

        Blocks for copies that run, and for nothing else.
        """
        with self._lock:
            self._closed = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()
        self._desk.close()
        for transfer in transfers:
            transfer.wait()  # For copies that run.
        self._desk.sweep()

    def _held(self, payload: Payload) -> bool | None:
        if self._desk.hidden(payload.key):
            return False
        match = self._cache.match(payload)
        return None if isinstance(match, Pending) else bool(match.hits)

    def _begin(self, items: SequenceOf[Item], default_s: float, deadline: float | None) -> Transfer:
        now = self._clock.now()
        transfer = Transfer(self._desk, items, now + default_s if deadline is None else deadline)
        self._forget_complete(now)
        with self._lock:
            if self._closed or len(self._transfers) >= KEYED_TRANSFERS_MAX:
                transfer.end(MissReason.UNAVAILABLE)
            else:
                self._transfers.add(transfer)
        transfer.poll()
        return transfer

    def _forget_complete(self, now: float) -> None:
        """Let go of transfers that are over, those included that nobody polls any more."""
        self._desk.sweep()
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            if transfer.deadline <= now:
                transfer.poll()
        with self._lock:
            self._transfers -= {transfer for transfer in transfers if transfer.complete}

    def _payloads(
        self, keys: SequenceOf[bytes], sizes: Iterable[int | None] = itertools.repeat(None)
    ) -> list[Payload]:
        if len(keys) > KEYED_BATCH_MAX:
            raise LayoutError(f"{len(keys)} keys at once; allowed are {KEYED_BATCH_MAX}")
        root = self._cache.root(self._namespace)
        return [
            Payload(self._namespace, root, foreign_key(root, self._scheme, key), nbytes)
            for key, nbytes in zip(keys, sizes, strict=False)
        ]


def _pieces(data: Source) -> Pieces:
    pieces = data if isinstance(data, tuple) else (data,)
    if len(pieces) > KEYED_PIECES_MAX:
        raise LayoutError(f"a payload in {len(pieces)} pieces; allowed are {KEYED_PIECES_MAX}")
    return Pieces(*map(_bytes_of, pieces))


def _bytes_of(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise LayoutError(f"a buffer whose bytes do not lie in one piece: {error}") from error
