"""A remote as a keeper of epochs: what other hosts raise is learned there, and what is raised here
is told there.

::

    round    read both copies ──► merge (the highest wins) ──► write where a copy says less
                  ▲                                                       │
                  └───────────────── until both say it all ◄──────────────┘

Two objects hold the same record, written one after the other: a store that replaces by removing
first always has one of them. Hosts that write at once overwrite each other; each looks again, at
once and in every round, and writes what is lacking. No clock of any host is compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvtier.cache.below.remote_source import Remote
from kvtier.cache.executor import Fault
from kvtier.cache.tenancy.epochs import Epochs, EpochSnapshot
from kvtier.constants import (
    EPOCHS_BYTES_MAX,
    EPOCHS_READ_S,
    EPOCHS_RETRY_S,
    EPOCHS_TELL_S_MAX,
    EPOCHS_TRIES_MAX,
    EPOCHS_WAIT_S_MAX,
    KIB,
)
from kvtier.errors import (
    ConnectorDataError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
    KVTierError,
    TierUnavailableError,
)
from kvtier.interfaces import Clock
from kvtier.tiers.epoch_record import StoredEpochs, decode_epochs, encode_epochs
from kvtier.tiers.health import Health

#: No shard's key, all of which have 38 bytes.
EPOCH_KEYS: Final = (b"kvtier-epochs-0", b"kvtier-epochs-1")
#: Most records are no longer, and come with the first read.
_USUAL_BYTES: Final = 64 * KIB

_log = logging.getLogger("kvtier.remote")

_Copy = bytes | ConnectorDataError | None


class RemoteEpochs:
    """Keeps one remote's epochs and ours the same. Used under the cache's lock.

    The rounds run in the channel's loop, one at a time, and take that lock. Until one has read
    what the remote knows, after the start, a raise or a fault, its tier does not answer. One that
    refuses to be read, as for a wrong token, is asked ever more rarely.
    ``raised`` is called under the lock when something was learned.
    """

    def __init__(
        self,
        remote: Remote,
        keeper: int,
        epochs: Epochs,
        lock: threading.Lock,
        clock: Clock,
        raised: Callable[[], None],
    ) -> None:
        self._tier = remote.tier
        self._channel = remote.channel
        self._keeper = keeper
        self._epochs = epochs
        self._lock = lock
        self._clock = clock
        self._raised = raised
        self._turn = asyncio.Lock()
        self._queued: Future[Fault | None] | None = None
        self._latest: Future[Fault | None] | None = None
        self._next_s = -math.inf
        self._access = Health()  # Whether it lets us read.
        self._doubts = 0  # A round counts that began to read after the latest of them.
        self._seen: tuple[Sequence[_Copy], int] | None = None

    @property
    def number(self) -> int:
        """The remote's place in the order in which they are asked."""
        return self._tier.number

    @property
    def owing(self) -> bool:
        """True while the remote has not been told of something that was raised here."""
        return self._epochs.owes(self._keeper)

    def doubt(self) -> None:
        """Ask the remote for nothing until its epochs have been read again."""
        self._doubts += 1
        self._tier.epochs_known = False

    def tick(self) -> None:
        """Begin a round where one is due."""
        if not self._tier.breaker.closed:
            if self._tier.epochs_known:
                self.doubt()
            self._next_s = -math.inf
            return
        over = self._latest is None or self._latest.done()
        now = self._clock.now()
        if over and now >= self._next_s and self._access.allows(now):
            self.begin()

    def begin(self) -> Future[Fault | None]:
        """Begin a round, after the one that runs; return what it will have come to.

        Whoever asks while one waits for its turn shares that one.
        """
        if self._queued is None:
            self._queued = self._latest = self._channel.submit(self._round())
        return self._queued

    def first(self) -> Future[Fault | None]:
        """Begin a round, unless there has been one; return what the latest comes to."""
        return self._latest if self._latest is not None else self.begin()

    async def _round(self) -> None:
        async with self._turn:
            with self._lock:
                self._queued = None
            try:
                await self._exchange()
            except (OSError, KVTierError) as fault:
                with self._lock:
                    self._end(fault)
                raise
            with self._lock:
                self._end(None)

    def _end(self, fault: Fault | None) -> None:
        now, known = self._clock.now(), self._tier.epochs_known
        if fault is not None:
            self._tier.failed(fault)
        if isinstance(fault, ConnectorRefusedError) and not known:
            self._access.failure("refused", str(fault), now)  # No fault to its breaker.
        else:
            self._access.success()
        self._tier.barred = self._access.detail
        self._next_s = now + (EPOCHS_READ_S if known else EPOCHS_RETRY_S)

    async def _exchange(self) -> None:
        """Read, merge and write until both copies say what is known here."""
        for attempt in range(EPOCHS_TRIES_MAX):
            with self._lock:
                doubts = self._doubts
            copies = await self._read()
            stored = _together(copies)
            with self._lock:
                known = self._merge(copies, stored)
                if doubts == self._doubts:
                    self._tier.epochs_known = True
            if known is None:
                return
            data = encode_epochs(known.epochs, known.floor)
            lacking = [key for key, copy in zip(EPOCH_KEYS, copies, strict=True) if copy != data]
            for key in lacking:
                if attempt:  # Another host was quicker, or this store keeps what is there.
                    await self._channel.delete([key])
                await self._channel.put(key, data)
            with self._lock:
                self._epochs.saved(self._keeper, known)
                if not lacking:
                    self._seen = (copies, self._epochs.version)
                    return
        raise ConnectorUnavailableError("what is written of epochs does not stay")

    async def _read(self) -> Sequence[_Copy]:
        try:
            return [await self._fetch(key) for key in EPOCH_KEYS]
        except (OSError, KVTierError):
            with self._lock:
                self._tier.epochs_known = False
            raise

    async def _fetch(self, key: bytes) -> _Copy:
        try:
            data = await self._channel.fetch(key, _USUAL_BYTES)
            if data is not None and len(data) == _USUAL_BYTES:
                data = await self._channel.fetch(key, EPOCHS_BYTES_MAX)
        except ConnectorDataError as error:
            return error
        return data

    def _merge(self, copies: Sequence[_Copy], stored: StoredEpochs) -> EpochSnapshot | None:
        """Take in what the remote knows; return what it should, None: it knows just that."""
        epochs = self._epochs
        if self._seen == (copies, epochs.version):
            return None
        before, known = epochs.version, epochs.snapshot()
        floor = stored.floor
        if stored.damaged:  # Above whatever it said, as far as that is known.
            floor = max(floor, 1 + max((known.floor, *known.epochs.values())))
        epochs.merge(self._keeper, stored.epochs, floor)
        if epochs.version != before:
            self._raised()
            known = epochs.snapshot()
        nothing = not known.epochs and not known.floor and not any(copies)
        return None if nothing else known


def _together(copies: Sequence[_Copy]) -> StoredEpochs:
    """Return what the copies say together. One that is sound makes up for a damaged one.

    Raises ``ConnectorDataError`` where there is none but what the connector cannot give.
    """
    known = [decode_epochs(copy) for copy in copies if isinstance(copy, bytes)]
    sound = [each for each in known if not each.damaged]
    if known and not sound:
        return known[0]
    faults = [copy for copy in copies if isinstance(copy, ConnectorDataError)]
    if faults and not sound:
        raise faults[0]
    epochs: dict[bytes, int] = {}
    for each in sound:
        for digest, epoch in each.epochs.items():
            epochs[digest] = max(epoch, epochs.get(digest, 0))
    return StoredEpochs(epochs, max((each.floor for each in sound), default=0))


def tell_remotes(keepers: Sequence[RemoteEpochs], lock: threading.Lock) -> None:
    """Tell every remote of what was raised here; blocks, for a bounded time.

    One that is away keeps none of the others from knowing. Raises ``TierUnavailableError`` for
    those that could not be told; they are told when they are back.
    """
    untold = [
        f"remote {number} has not been told of the epoch and is when it is back: {why}"
        for number, why in _failed(keepers, _begun(keepers, lock), EPOCHS_TELL_S_MAX)
    ]
    if untold:
        raise TierUnavailableError("; ".join(untold))


def await_remotes(keepers: Sequence[RemoteEpochs], lock: threading.Lock) -> None:
    """Block until every remote's epochs have been read, for a bounded time."""
    with lock:
        begun = [keeper.first() for keeper in keepers]
    _failed(keepers, begun, EPOCHS_WAIT_S_MAX)


def tell_last(keepers: Sequence[RemoteEpochs], lock: threading.Lock, timeout_s: float) -> None:
    """Try once more at the end; what is not told by then a directory keeps for the next start."""
    for number, why in _failed(keepers, _begun(keepers, lock), timeout_s):
        _log.warning("remote %d has not been told of an epoch: %s", number, why)


def _begun(keepers: Sequence[RemoteEpochs], lock: threading.Lock) -> Sequence[Future[Fault | None]]:
    with lock:
        return [keeper.begin() for keeper in keepers]


def _failed(
    keepers: Sequence[RemoteEpochs], begun: Sequence[Future[Fault | None]], timeout_s: float
) -> list[tuple[int, str]]:
    """Wait for a round of each; return which came to nothing in time, and why."""
    end = time.monotonic() + timeout_s
    failed: list[tuple[int, str]] = []
    for keeper, future in zip(keepers, begun, strict=True):
        try:
            fault = future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            failed.append((keeper.number, "no answer in time"))
        else:
            if fault is not None:
                failed.append((keeper.number, str(fault)))
    return failed
