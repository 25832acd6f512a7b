"""The remotes of a cache, in the order in which they are asked, and their upkeep.

A question goes out for what a request would need next and nobody has asked yet; its answer serves
every request. A request waits for answers, not for a remote that fails: while a breaker is not
closed, that remote is left out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvtier.cache.below.fill import Origin
from kvtier.cache.below.remote_source import Remote, RemoteSource
from kvtier.cache.executor import Executor, Fault
from kvtier.cache.sequence import Sequence as TokenSequence
from kvtier.cache.shapes import Shapes
from kvtier.codecs.opaque import opaque_codec
from kvtier.constants import REMOTE_ASKED_CHUNKS_MAX, REMOTE_LISTED_MAX
from kvtier.errors import ConnectorRefusedError
from kvtier.interfaces import Clock
from kvtier.keys import shard_key
from kvtier.tiers.remote.batches import ask_count
from kvtier.types import ChunkKey, KeyInfo, KVLayout, ShardId, Tier

_NOTHING: frozenset[ShardId] = frozenset()


class Remotes:
    """Looks up, asks and probes. Used under the cache's lock, which its callbacks take."""

    def __init__(
        self,
        remotes: Sequence[Remote],
        executor: Executor,
        lock: threading.Lock,
        clock: Clock,
        shapes: Shapes,
        codec: str,
    ) -> None:
        """``codec`` is what chunks are taken to be packed with until a header says otherwise."""
        self.all = tuple(remotes)
        self._executor = executor
        self._lock = lock
        self._clock = clock
        self._shapes = shapes
        self._codec = codec
        self._asking: dict[Remote, set[ChunkKey]] = {remote: set() for remote in remotes}
        self._listing: set[Remote] = set()

    @property
    def answers(self) -> bool:
        """True when any remote may be asked now."""
        return any(remote.tier.answers for remote in self.all)

    @property
    def state(self) -> tuple[str, str]:
        """One word for how the first remote in trouble is doing, ``ok`` when all are well."""
        for remote in self.all:
            word, detail = remote.tier.state
            if word != "ok":
                return word, f"remote {remote.tier.number}: {detail}"
        return "ok", ""

    def look(self, key: ChunkKey) -> frozenset[ShardId] | None:
        """Return the shards of a chunk in the first remote with any; None: not known."""
        for remote in self.all:
            if remote.tier.answers:
                shards = remote.tier.shards(key)
                if shards is None or shards:
                    return shards
        return _NOTHING

    def holds(self, key: ChunkKey) -> bool:
        """Tell whether a remote is believed to hold a chunk, whether or not it answers."""
        return any(remote.tier.shards(key) for remote in self.all)

    def codec_of(self, sequence: TokenSequence, key: ChunkKey) -> str:
        """Return what a chunk that ``look`` finds is taken to be packed with."""
        holder = next(each for each in self.all if each.tier.answers and each.tier.shards(key))
        return self._codec_in(holder, sequence, key)

    def find(
        self, sequence: TokenSequence, chunk: int, without: Collection[str]
    ) -> RemoteSource | None:
        """Return what a chunk can be brought up from now, some places left out.

        What is packed with a codec unknown here is left aside.
        """
        key = sequence.chunk_keys[chunk]
        for remote in self.all:
            shards = remote.tier.shards(key) if remote.tier.answers else None
            codec = self._codec_in(remote, sequence, key)
            fidelity = sequence.namespace.fidelity
            if shards and self._shapes.usable(sequence.layout, codec, fidelity):
                parent = sequence.entry_parent(chunk)
                place, root = f"remote {remote.tier.number}", sequence.root
                if place in without:
                    continue
                origin = Origin(Tier.REMOTE, place, key, parent, chunk, root, codec, shards)
                return RemoteSource(remote, origin, self._executor)
        return None

    def ask(
        self,
        sequence: TokenSequence,
        first: int,
        found: int,
        held: Callable[[ChunkKey], bool],
    ) -> bool:
        """Ask for a sequence's chunks from ``first`` on, so many of which were found before it.

        Those that are ``held`` by a nearer tier are left out. Returns whether the answer for the
        first one is on its way; it is not where too much is being asked already.
        """
        if self._asks(sequence.chunk_keys[first]):
            return True  # And with it for what comes after it.
        wanted: dict[Remote, list[ChunkKey]] = {}
        for key in sequence.chunk_keys[first : first + ask_count(found)]:
            remote = None if held(key) else self._to_ask(key)
            if remote is not None and key not in self._asking[remote]:
                wanted.setdefault(remote, []).append(key)
        for remote, keys in wanted.items():
            room = REMOTE_ASKED_CHUNKS_MAX - len(self._asking[remote])
            if keys[:room]:
                self._send(remote, keys[:room], sequence.layout)
        return self._asks(sequence.chunk_keys[first])

    def tick(self) -> None:
        """Start what is due: a probe of what fails, a listing of what is ours alone."""
        now = self._clock.now()
        for remote in self.all:
            holdings = remote.tier.holdings
            if remote.tier.breaker.take_probe(now):
                future = remote.channel.submit(remote.channel.probe())
                probed = partial(self._probed, remote)
                self._executor.watch(future, probed, deadline=math.inf, late=probed)
            elif holdings is not None and not holdings.listed and remote.tier.answers:
                self._list(remote)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        for remote in self.all:
            remote.tier.written.check_integrity()
            if remote.tier.holdings is not None:
                remote.tier.holdings.check_integrity()
            if len(self._asking[remote]) > REMOTE_ASKED_CHUNKS_MAX:
                raise AssertionError(f"{len(self._asking[remote])} chunks are being asked for")

    def _asks(self, key: ChunkKey) -> bool:
        return any(key in asking for asking in self._asking.values())

    def _codec_in(self, remote: Remote, sequence: TokenSequence, key: ChunkKey) -> str:
        told = remote.tier.chunk_codec_of(key)
        alike = told is not None and (opaque_codec(told) is None) == (sequence.codec is None)
        if told is not None and alike and sequence.takes(told):
            return told  # A payload of any size, or what was packed elsewhere.
        namespace = sequence.namespace
        own = sequence.codec or remote.tier.codec_of(sequence.root)
        if own is not None and own in {self._codec, sequence.codec}:
            return own
        # What another host packed may be of no use here; that says nothing of the rest.
        if own is not None and self._shapes.usable(sequence.layout, own, namespace.fidelity):
            return own
        return self._shapes.codecs.packing(self._codec, namespace)

    def _to_ask(self, key: ChunkKey) -> Remote | None:
        """Return the first remote that may have a chunk and has not said so."""
        for remote in self.all:
            if remote.tier.answers:
                shards = remote.tier.shards(key)
                if shards is None:
                    return remote
                if shards:
                    return None
        return None

    def _send(self, remote: Remote, keys: Sequence[ChunkKey], layout: KVLayout) -> None:
        shards = sorted(self._shapes.shards(layout))
        objects = [shard_key(key, shard) for key in keys for shard in shards]
        self._asking[remote].update(keys)

        def answered(outcome: list[bool] | Fault) -> None:
            with self._lock:
                self._asking[remote].difference_update(keys)
                if not isinstance(outcome, list):
                    remote.tier.failed(outcome)
                    return
                there = iter(outcome)
                for key in keys:
                    found = frozenset(s for s in shards if next(there))
                    if not remote.tier.shards(key):  # Else it was written since it was asked for.
                        remote.tier.learn(key, found)

        future = remote.channel.submit(remote.channel.contains(objects))
        self._executor.watch(future, answered, deadline=math.inf, late=answered)

    def _probed(self, remote: Remote, outcome: Fault | None) -> None:
        with self._lock:
            if outcome is None:
                remote.tier.succeeded(probe=True)
            else:
                remote.tier.failed(outcome)

    def _list(self, remote: Remote) -> None:
        if remote in self._listing:
            return
        self._listing.add(remote)
        holdings = remote.tier.holdings
        assert holdings is not None, "only what is ours alone is listed"

        def listed(outcome: list[KeyInfo] | Fault) -> None:
            with self._lock:
                if isinstance(outcome, list):
                    holdings.adopt(outcome)
                elif isinstance(outcome, ConnectorRefusedError):
                    remote.tier.refusing = str(outcome)  # It will not say; nothing is written.
                    return
                else:
                    remote.tier.failed(outcome)
                self._listing.discard(remote)

        future = remote.channel.submit(remote.channel.listing(b"", REMOTE_LISTED_MAX))
        self._executor.watch(future, listed, deadline=math.inf, late=listed)
