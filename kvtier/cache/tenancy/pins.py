"""Chunks that stay: kept from eviction until a time, in a bounded share of each tier.

A pin is a promise on what is held: until its time is over or it is taken back, eviction takes none
of these chunks. It ends with the process, with the epoch, and where bytes are lost or damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.tenancy.roots import Rooted, Roots
from kvtier.constants import PIN_S_MAX, PINNED_CHUNKS_MAX, PINNED_SHARE_MAX
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier, PolicyFactory
from kvtier.types import ChunkKey, Entry, Features, MissReason

_FEATURES = Features()


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """The first so many tokens of a prefix are pinned; ``reason`` says why not more are.

    ``absent``: no tier holds more. ``no_room``: as much is pinned as may be. ``unavailable``: the
    match is of an earlier epoch.
    """

    tokens: int
    reason: MissReason | None


class _Pin(NamedTuple):
    until: float
    nbytes: int
    root: bytes


class KeptKeys:
    """What is pinned in one tier of ``capacity_bytes``. Used under the cache's lock."""

    def __init__(self, capacity_bytes: int, clock: Clock) -> None:
        self._share_bytes = int(capacity_bytes * PINNED_SHARE_MAX)
        self._clock = clock
        self._pins: dict[ChunkKey, _Pin] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are pinned; at most ``PINNED_SHARE_MAX`` of the tier's."""
        return self._nbytes

    def keeps(self, key: ChunkKey) -> bool:
        """Tell whether a chunk must stay now."""
        pin = self._pins.get(key)
        return pin is not None and pin.until > self._clock.now()

    def keep(self, key: ChunkKey, nbytes: int, root: bytes, until: float) -> bool:
        """Pin a chunk, or prolong its pin; False: more may not be pinned."""
        pin = self._pins.get(key)
        before = pin.nbytes if pin is not None else 0
        if self._nbytes - before + nbytes > self._share_bytes:
            return False
        if pin is None and len(self._pins) >= PINNED_CHUNKS_MAX:
            return False
        self._pins[key] = _Pin(max(until, pin.until if pin else 0.0), nbytes, root)
        self._nbytes += nbytes - before
        return True

    def drop(self, key: ChunkKey) -> bool:
        """Let a chunk go when its turn comes; False: it was not pinned."""
        pin = self._pins.pop(key, None)
        self._nbytes -= pin.nbytes if pin is not None else 0
        return pin is not None

    def nbytes_of(self, root: bytes) -> int:
        """Return the bytes of one root's chunks that are pinned now."""
        now = self._clock.now()
        pins = self._pins.values()
        return sum(pin.nbytes for pin in pins if pin.root == root and pin.until > now)

    def standing(self) -> Iterator[tuple[ChunkKey, bytes, float]]:
        """Yield the chunks that must stay now, with their roots and until when."""
        now = self._clock.now()
        for key, pin in self._pins.items():
            if pin.until > now:
                yield key, pin.root, pin.until

    def drop_over(self, stale: Collection[bytes], held: Callable[[ChunkKey], bool]) -> None:
        """Drop pins whose time is over, those of stale roots, and those of what is not held."""
        now = self._clock.now()
        for key, pin in list(self._pins.items()):
            if pin.until <= now or pin.root in stale or not held(key):
                self.drop(key)

    def guard(self, policy: PolicyFactory) -> PolicyFactory:
        """Return a policy that leaves alone what is pinned here too."""
        return lambda capacity, pinned: _Guarded(policy, capacity, pinned, self.keeps)


class _Guarded:
    """An ``EvictionPolicy`` that evicts nothing that is kept.

    What a decision had to pass over counts as used then: it would stand in the way of every other
    decision, and with many pins each would take milliseconds.
    """

    def __init__(
        self,
        policy: PolicyFactory,
        capacity_bytes: int,
        pinned: Callable[[ChunkKey], bool],
        keeps: Callable[[ChunkKey], bool],
    ) -> None:
        self._pinned = pinned
        self._keeps = keeps
        self._met: list[ChunkKey] = []
        self._policy = policy(capacity_bytes, self._stays)

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """See ``EvictionPolicy.admit``."""
        victims = self._policy.admit(entry, now)
        for key in self._met:
            self._policy.touch(key, now, _FEATURES)
        self._met.clear()
        return victims

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``EvictionPolicy.touch``."""
        self._policy.touch(key, now, features)

    def remove(self, key: ChunkKey) -> None:
        """See ``EvictionPolicy.remove``."""
        self._policy.remove(key)

    def _stays(self, key: ChunkKey) -> bool:
        if self._keeps(key):
            self._met.append(key)
            return True
        return self._pinned(key)


class Pins:
    """Pins over all tiers. The methods named in the first part take the cache's lock."""

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        roots: Roots,
        dram: tuple[DramTier, KeptKeys],
        disk: tuple[DiskTier, KeptKeys] | None,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._roots = roots
        self._dram, self._kept_in_dram = dram
        self._disk = disk[0] if disk is not None else None
        self._kept_on_disk = disk[1] if disk is not None else None

    def pin(self, match: Ready, seconds: float) -> PinOutcome:
        """Keep what a match found from eviction for so long, in each tier that holds it.

        Chunk by chunk from the first on, as far as the share allows. A chunk that is pinned stays
        so until the later of its times. Raises ``ConfigError`` for a time that cannot be.
        """
        check_pin_seconds("seconds", seconds)
        with self._lock:
            if not self._roots.current(match.sequence):
                return PinOutcome(0, MissReason.UNAVAILABLE)
            size = match.sequence.chunk_tokens
            until = self._clock.now() + seconds
            for chunk, hit in enumerate(match.hits):
                reason = self.keep(match.sequence, hit.key, until)
                if reason is not None:
                    return PinOutcome(chunk * size, reason)
            whole = match.tokens == len(match.sequence.chunk_keys) * size
            return PinOutcome(match.tokens, None if whole else MissReason.ABSENT)

    def unpin(self, match: Ready) -> int:
        """Let what a match found leave when its turn comes; return how many tokens were pinned.

        A prefix has one pin: others that wanted the same chunks to stay have lost it too, except
        those whose pinned chunks follow these.
        """
        with self._lock:
            dropped = [self.drop(hit.key) for hit in match.hits]
        return sum(dropped) * match.sequence.chunk_tokens

    def unpin_sequence(self, sequence: Sequence) -> int:
        """Do the same with all chunks of a sequence, whether or not a tier has them now."""
        with self._lock:
            dropped = [self.drop(key) for key in sequence.chunk_keys]
        return sum(dropped) * sequence.chunk_tokens

    def pinned_tokens(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens are held and pinned now."""
        with self._lock:
            count = 0
            for key in sequence.chunk_keys:
                if not self._is_pinned(key):
                    break
                count += 1
        return count * sequence.chunk_tokens

    # Under the cache's lock.

    def keep(self, sequence: Rooted, key: ChunkKey, until: float) -> MissReason | None:
        """Pin one chunk wherever it lies; None: it is pinned, else why it is not."""
        record = self._dram.index.get(key)
        on_disk = self._disk.ready(key) if self._disk is not None else None
        source = record or on_disk
        if source is None:
            return MissReason.ABSENT
        nbytes = source.entry.nbytes
        kept = record is not None and self._kept_in_dram.keep(key, nbytes, sequence.root, until)
        if self._kept_on_disk is not None:
            below = self._kept_on_disk.keep(key, nbytes, sequence.root, until)
            kept = kept or (below and on_disk is not None)
        return None if kept else MissReason.NO_ROOM

    def drop_over(self) -> None:
        """Forget pins whose time is over, that an epoch has ended, or of what is gone."""
        stale = self._roots.stale()
        self._kept_in_dram.drop_over(stale, self._holds)
        if self._kept_on_disk is not None:
            self._kept_on_disk.drop_over(stale, self._holds)

    def keeps(self, key: ChunkKey) -> bool:
        """Tell whether a chunk must stay in any tier."""
        below = self._kept_on_disk is not None and self._kept_on_disk.keeps(key)
        return below or self._kept_in_dram.keeps(key)

    def drop(self, key: ChunkKey) -> bool:
        """Unpin one chunk; False: it was not pinned."""
        below = self._kept_on_disk is not None and self._kept_on_disk.drop(key)
        return self._kept_in_dram.drop(key) or below

    def _holds(self, key: ChunkKey) -> bool:
        below = self._disk is not None and self._disk.holds(key)
        return below or self._dram.index.get(key) is not None

    def _is_pinned(self, key: ChunkKey) -> bool:
        in_dram = self._dram.index.get(key) is not None and self._kept_in_dram.keeps(key)
        if in_dram or self._disk is None or self._kept_on_disk is None:
            return in_dram
        return self._kept_on_disk.keeps(key) and self._disk.holds(key)


def check_pin_seconds(name: str, seconds: float) -> None:
    """Raise ``ConfigError`` for a time that no pin may have."""
    if not 0 < seconds <= PIN_S_MAX:
        raise ConfigError(f"{name} = {seconds!r}: allowed is more than 0, at most {PIN_S_MAX:g}")
