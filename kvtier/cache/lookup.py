"""What is held of a sequence, and counting what was asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.writeout import Writeout
from kvtier.cache.match import Ready
from kvtier.cache.planner import present_groups, usable_chunks
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.worth.costs import Choice
from kvtier.obs.counters import Counters
from kvtier.obs.events import EventLog
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkHit, ChunkKey, MissReason, ShardId, Tier


@dataclass(frozen=True, slots=True)
class Found:
    """What is held of a sequence, and the first chunk of which it is not known: None: all is."""

    hits: tuple[ChunkHit, ...]
    unknown: int | None

    def unknown_token(self, sequence: Sequence) -> int:
        """Return the first token of which it is not known."""
        return (self.unknown or 0) * sequence.chunk_tokens

    @property
    def remote_count(self) -> int:
        """Chunks that only a remote holds."""
        return sum(hit.tier is Tier.REMOTE for hit in self.hits)


class Lookup:
    """Finds and counts. Used under the cache's lock; changes nothing but order and counters."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        room: RemoteRoom | None,
        writeout: Writeout | None,
        shapes: Shapes,
        counters: Counters,
        events: EventLog | None,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._room = room
        self._writeout = writeout
        self._shapes = shapes
        self._counters = counters
        self._events = events

    def find(self, sequence: Sequence) -> Found:
        """Return the longest usable prefix, each chunk with the fastest tier that holds it."""
        layout = sequence.layout
        whole = self._shapes.shards(layout)
        every = frozenset(range(len(layout.groups)))
        disk = self._disk
        if disk is not None and not any(volume.answers for volume in disk.volumes):
            disk = None
        hits: list[ChunkHit] = []
        present: list[frozenset[int]] = []
        usable: dict[str, bool] = {}  # By codec: chunks of one sequence have few.
        remotes = self._room.remotes if self._room is not None else None
        unknown: int | None = None
        for key in sequence.chunk_keys:
            tier = Tier.DRAM
            codec: str
            shards: Collection[ShardId]
            record = self._dram.index.ready(key)
            if record is not None:
                codec, shards = record.codec, record.places.keys()
            elif disk is not None and (found := disk.find(key)) is not None:
                codec, shards = found
                tier = Tier.DISK
            elif remotes is not None:
                there = remotes.look(key)
                if not there:
                    unknown = len(hits) if there is None else None
                    break
                codec, shards, tier = remotes.codec_of(sequence, key), there, Tier.REMOTE
            else:
                break
            if codec not in usable:
                fidelity = sequence.namespace.fidelity
                fits = sequence.takes(codec)
                usable[codec] = fits and self._shapes.usable(layout, codec, fidelity)
            if not usable[codec]:
                break
            present.append(every if whole == shards else present_groups(layout, shards))
            hits.append(ChunkHit(key, tier, codec))
        return Found(tuple(hits[: usable_chunks(layout, present)]), unknown)

    def waits(self, sequence: Sequence, found: Found, now: float, patience_s: float) -> bool:
        """Have the remotes asked for what is not known; tell whether that is to be waited for."""
        if found.unknown is None or self._room is None:
            sequence.pending_until = None
            return False
        if sequence.pending_until is None:
            sequence.pending_until = now + patience_s
        first = found.unknown
        coming = self._room.remotes.ask(sequence, first, found.remote_count, self._held)
        return coming and now < sequence.pending_until

    def touch(self, match: Ready) -> None:
        """Note a request's access to all that a match found, the deepest chunk first; once."""
        sequence = match.sequence
        if sequence.touched:
            return
        sequence.touched = True
        keys = [hit.key for hit in reversed(match.hits)]
        self._dram.touch(keys, sequence.features)
        if self._disk is not None and self._writeout is not None:
            self._disk.touch(keys, sequence.features)
            for hit in match.hits:  # Parents first: where a parent is not written, no child is.
                self._writeout.note(hit.key, sequence.layout, sequence.features)
        if self._room is not None:
            self._room.touch(match)
        if self._events is not None:
            sequence.teach(self._events, range(len(match.hits)))

    def count(self, match: Ready, start_token: int, end_token: int) -> None:
        """Count the whole chunks between two tokens that each tier was asked for in vain."""
        size = match.sequence.chunk_tokens
        salt = match.sequence.namespace.tenant_salt
        reason = MissReason.ABSENT
        if self._disk is not None and not self._disk.readable():
            reason = MissReason.UNAVAILABLE
        for chunk in range(start_token // size, end_token // size):
            tokens = (chunk + 1) * size - max(start_token, chunk * size)
            tier = match.hits[chunk].tier if chunk < len(match.hits) else None
            if tier is not None:
                tier = match.sequence.came_from(chunk, tier)
            if tier is not Tier.DRAM:
                self._counters.note_miss(salt, Tier.DRAM, MissReason.ABSENT, tokens)
            if tier in {None, Tier.REMOTE} and self._disk is not None:
                self._counters.note_miss(salt, Tier.DISK, reason, tokens)
            if tier is None and self._room is not None:
                away = not self._room.remotes.answers
                why = MissReason.UNAVAILABLE if away else MissReason.ABSENT
                self._counters.note_miss(salt, Tier.REMOTE, why, tokens)

    def _held(self, key: ChunkKey) -> bool:
        if self._dram.index.ready(key) is not None:
            return True
        return self._disk is not None and self._disk.find(key) is not None

    def count_left(self, match: Ready, choice: Choice) -> None:
        """Count what is not loaded because computing it is quicker."""
        salt = match.sequence.namespace.tenant_salt
        for each in choice.left:
            run = each.segment
            self._counters.note_miss(salt, run.tier, MissReason.COST, run.tokens)
