"""The remote tier's books: what is known of one remote, whether it is asked, what it may hold.

Decides under the cache's lock; ``Channel`` does, without it.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict

from kvtier.constants import LATE_JOBS_MAX, LEND_PAUSE_S, REMOTE_CODECS_MAX, REMOTE_KNOWN_CHUNKS_MAX
from kvtier.errors import (
    ConnectorRefusedError,
    ConnectorTimeoutError,
    DeadlineError,
    KVTierError,
)
from kvtier.interfaces import Clock
from kvtier.tiers.remote.asked import Asked
from kvtier.tiers.remote.breaker import Breaker, BreakerState
from kvtier.tiers.remote.holdings import Holdings
from kvtier.tiers.remote.written import Written
from kvtier.types import ChunkKey, ShardId

_NOTHING: frozenset[ShardId] = frozenset()


class RemoteTier:
    """Owns breaker, knowledge and holdings of one remote. Used under the cache's lock.

    ``holdings`` stay None where others write to the remote too: then it bounds itself.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        draws: random.Random,
        *,
        ttl_s: float,
        absent_s: float,
    ) -> None:
        self.number = number
        self.holdings: Holdings | None = None
        self.breaker = Breaker(draws)
        self.late_count = 0  # Reads that are overdue and have not ended.
        self.epochs_known = False  # What was raised by others has been read.
        self.barred = ""  # Why it lets us read nothing, its epochs included; empty: it does.
        self.refusing = ""  # Why it takes no writes although it answers; empty: it does.
        self.shrinks = False  # What was read last was encoded, so the next may be shorter too.
        #: What was written there for tenants since the start.
        self.written = Written(REMOTE_KNOWN_CHUNKS_MAX)
        self._clock = clock
        self._lends_from = -math.inf
        self._asked = Asked(there_s=ttl_s, absent_s=absent_s, chunks_max=REMOTE_KNOWN_CHUNKS_MAX)
        self._spoiled: OrderedDict[ChunkKey, None] = OrderedDict()
        self._codecs: OrderedDict[bytes, str] = OrderedDict()
        self._chunk_codecs: OrderedDict[ChunkKey, str] = OrderedDict()

    @property
    def answers(self) -> bool:
        """True when requests may ask it now.

        Its breaker is closed, its epochs are known and few answers are overdue.
        """
        return self.breaker.closed and self.epochs_known and self.late_count < LATE_JOBS_MAX

    @property
    def writable(self) -> bool:
        """True when a write may be started now."""
        return self.answers and (self.holdings is None or self.holdings.listed)

    @property
    def lends(self) -> bool:
        """True where what lies there may be asked for as a loan: encoded, it would be of no use."""
        return not self.shrinks and self._clock.now() >= self._lends_from

    def lend_no_more(self) -> None:
        """Note that it did not lend what was asked for: for a while that is copied."""
        self._lends_from = self._clock.now() + LEND_PAUSE_S

    @property
    def state(self) -> tuple[str, str]:
        """One word for how it is doing, ``ok`` when well, and the latest fault."""
        breaker = self.breaker
        if breaker.state is not BreakerState.CLOSED:
            return breaker.word, f"{breaker.detail}; breaker {breaker.state.value}"
        if self.late_count >= LATE_JOBS_MAX:
            return "slow", f"{self.late_count} answers are overdue; breaker closed"
        if not self.epochs_known and self.barred:
            return "failing", self.barred
        if not self.epochs_known:
            return "opening", self.breaker.detail or "reading its epochs"
        if self.refusing:
            return "full", self.refusing
        if self.holdings is not None and not self.holdings.listed:
            return "opening", "listing what it holds"
        return "ok", ""

    def shards(self, key: ChunkKey) -> frozenset[ShardId] | None:
        """Return the shards of a chunk that are there, none at all included; None: not known."""
        said = self._asked.shards(key, self._clock.now())
        if said is not None or self.holdings is None or not self.holdings.listed:
            return said
        record = self.holdings.index.ready(key)
        return frozenset(record.places) if record is not None else _NOTHING

    def learn(self, key: ChunkKey, shards: frozenset[ShardId]) -> None:
        """Take an answer in: which shards of a chunk are there."""
        if not shards:
            self.written.drop(key)
            self._chunk_codecs.pop(key, None)
        self._asked.learn(key, shards, self._clock.now())

    def lose(self, key: ChunkKey) -> None:
        """Take in that a chunk is not there after all, or of no use."""
        self.written.drop(key)
        self._asked.learn_absent(key, self._clock.now())
        if self.holdings is not None:
            record = self.holdings.index.ready(key)
            if record is not None:
                self.holdings.forget(record)

    def spoil(self, key: ChunkKey) -> None:
        """Take in that a chunk is there and not what was written, which its store cannot tell.

        It is lost, and to be written anew although its objects are found.
        """
        self.lose(key)
        self._spoiled[key] = None
        if len(self._spoiled) > REMOTE_KNOWN_CHUNKS_MAX:
            self._spoiled.popitem(last=False)

    def spoiled(self, key: ChunkKey) -> bool:
        """Tell whether a chunk was spoilt and has not been written since."""
        return key in self._spoiled

    def wrote(self, key: ChunkKey) -> None:
        """Take in that a chunk has been written whole."""
        self._spoiled.pop(key, None)
        self._chunk_codecs.pop(key, None)

    def codec_of(self, root: bytes) -> str | None:
        """Return the codec in which chunks of a namespace were last found to lie there."""
        return self._codecs.get(root)

    def learn_codec(self, root: bytes, codec: str) -> None:
        """Take in the codec that a header told."""
        self._codecs[root] = codec
        self._codecs.move_to_end(root)
        if len(self._codecs) > REMOTE_CODECS_MAX:
            self._codecs.popitem(last=False)

    def chunk_codec_of(self, key: ChunkKey) -> str | None:
        """Return the codec of a chunk that had another one than was expected; a payload's size."""
        return self._chunk_codecs.get(key)

    def learn_chunk_codec(self, key: ChunkKey, codec: str) -> None:
        """Take in what the header of a chunk told, for this one alone."""
        self._chunk_codecs[key] = codec
        self._chunk_codecs.move_to_end(key)
        if len(self._chunk_codecs) > REMOTE_KNOWN_CHUNKS_MAX:
            self._chunk_codecs.popitem(last=False)

    def succeeded(self, *, probe: bool = False) -> None:
        """Note that it did what was asked."""
        if probe:
            self._asked.forget_absent()  # While it failed it may have found nothing.
        self.breaker.success(probe=probe)

    def evicted(self, key: ChunkKey) -> None:
        """Take in that a chunk was made to leave."""
        self.written.drop(key)
        self._asked.learn_absent(key, self._clock.now())

    def slow(self) -> None:
        """Note that an answer is overdue."""
        self.breaker.failure("slow", "no answer in time", self._clock.now())

    def failed(self, fault: OSError | KVTierError) -> None:
        """Note a fault or an answer that is overdue. What it merely refuses is none."""
        if isinstance(fault, ConnectorRefusedError):
            return
        late = isinstance(fault, DeadlineError | ConnectorTimeoutError)
        word = "slow" if late else "failing"
        self.breaker.failure(word, str(fault), self._clock.now())
