"""A link, a device that computes and requests between them, in virtual time.

The oracle of the cost model: what a load or recomputing takes here follows from the world's own
rates and never from anything that the model believes.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.worth.costs import Choice, Costs
from kvtier.cache.worth.patience import Patience, Progress
from kvtier.codecs.known import KnownCodecs
from kvtier.keys import namespace_digest
from kvtier.testing.clock import FakeClock
from kvtier.types import ChunkHit, ChunkKey, GroupKind, KVGroup, KVLayout, Namespace, Tier

CHUNK = 256
#: Thirty-two layers are eight sections; the sizes of a small model in float32.
LAYOUT = KVLayout((KVGroup(GroupKind.FULL, tuple(range(32)), 3, 64, 64, "float32"),))
SECTIONS = 8
LANES = 4
STEP_TOKENS = 512
NEVER = 1e18
#: How often the engine looks at a load.
POLL_S = 0.002


@dataclass(eq=False)
class _Read:
    """A chunk on its way."""

    nbytes: int
    left_bytes: float
    latency_s: float
    sections: int = 0

    @property
    def section_bytes(self) -> float:
        return self.nbytes / SECTIONS


@dataclass
class World:
    """``rate`` in bytes a second and ``latency_s`` may change at any time."""

    seed: int
    rate: float = 1e9
    latency_s: float = 0.0
    token_s: float = 0.002
    growth: float = 2e-4
    noise: float = 0.0
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        shapes = Shapes(KnownCodecs())
        self.costs = Costs(threading.Lock(), self.clock, shapes, {Tier.DISK: "/disk"})
        self.chunk_bytes = shapes.of(LAYOUT, 0, "raw").chunk_bytes
        self.namespace = Namespace("weights", LAYOUT)
        #: How often the link has fallen idle: each time is a measurement.
        self.busy_times = 0
        self._reads: list[_Read] = []
        self._plain: dict[int, tuple[float, float, float]] = {}

    # What is true of the world.

    def recompute_s(self, start: int, end: int) -> float:
        """What computing takes."""
        tokens = end - start
        return tokens * self.token_s * (1 + self.growth * (start + tokens / 2))

    def load_s(self, tokens: int) -> float:
        """What a load takes that nobody cuts off, on an idle link."""
        if self._plain.get(tokens, (0.0, 0.0, 0.0))[:2] != (self.rate, self.latency_s):
            world = World(self.seed, self.rate, self.latency_s)
            self._plain[tokens] = self.rate, self.latency_s, world.serve(tokens)
        return self._plain[tokens][2]

    # What happens in it.

    def compute(self, start: int, end: int) -> float:
        """Compute in steps, each of which the model learns from; return how long it took."""
        total = 0.0
        for first in range(start, end, STEP_TOKENS):
            stop = min(first + STEP_TOKENS, end)
            seconds = self.recompute_s(first, stop) * self._noise()
            self.costs.note_prefill(first, stop - first, seconds)
            self.pass_time(seconds)
            total += seconds
        return total

    def serve(self, tokens: int) -> float:
        """Answer a request of which the disk holds so many tokens; return the time it took."""
        hits = tuple(ChunkHit(_key(i), Tier.DISK, "raw") for i in range(tokens // CHUNK))
        match = Ready(Sequence(self.namespace, namespace_digest(self.namespace)), hits)
        choice = self.costs.choose(match, 0, tokens)
        self.costs.note_choice(choice)
        if choice.end_token == 0:
            return self.compute(0, tokens)
        return self._load(choice, tokens)

    def settle(self, limit_s: float = NEVER) -> None:
        """Let what is under way end, for so long at most."""
        end = self.clock.now() + limit_s
        while self._reads and self.clock.now() < end:
            self.pass_time(min(self._next_event_s(), end - self.clock.now()))

    def pass_time(self, seconds: float) -> None:
        """Let transfers go on for so long."""
        while self._reads and seconds > 0:
            step = min(seconds, self._next_event_s())
            self._move(step)
            seconds -= step
        self.clock.advance(max(seconds, 0.0))

    def _load(self, choice: Choice, tokens: int) -> float:
        began = self.clock.now()
        patience = self.costs.patience(choice)
        mine: list[_Read] = []
        while not self._over(patience, mine, choice.end_token):
            done = sum(read.sections == SECTIONS for read in mine)
            lanes = 1 if patience is not None and patience.doubtful else LANES
            while len(mine) < choice.end_token // CHUNK and len(mine) - done < lanes:
                mine.append(self._begin())
            if done == choice.end_token // CHUNK:
                break
            look_s = NEVER if patience is None else POLL_S
            self.pass_time(min(self._next_event_s(), look_s))
        complete = next((i for i, read in enumerate(mine) if read.sections < SECTIONS), len(mine))
        self.compute(complete * CHUNK, tokens)
        return self.clock.now() - began

    def _over(self, patience: Patience | None, mine: list[_Read], end_token: int) -> bool:
        if patience is None:
            return False
        share = sum(read.sections for read in mine) / (SECTIONS * end_token // CHUNK)
        complete = next((i for i, read in enumerate(mine) if read.sections < SECTIONS), len(mine))
        coming = sum(read.sections < SECTIONS for read in mine) - 1
        total = SECTIONS * end_token // CHUNK
        progress = Progress(share, max(coming, 0) / total, complete * CHUNK)
        return patience.over(self.clock.now(), progress)

    def _begin(self) -> _Read:
        latency = self.latency_s * self._noise()
        read = _Read(self.chunk_bytes, self.chunk_bytes / self._noise(), latency)
        read.left_bytes = read.section_bytes * self._noise()
        self._reads.append(read)
        self.costs.link(Tier.DISK).started(self.clock.now(), self.chunk_bytes)
        return read

    def _next_event_s(self) -> float:
        sending = [read for read in self._reads if read.latency_s <= 0]
        share = self.rate / max(len(sending), 1)
        events = [read.left_bytes / share for read in sending]
        events += [read.latency_s for read in self._reads if read.latency_s > 0]
        return max(min(events, default=0.002), 1e-9)

    def _move(self, seconds: float) -> None:
        link = self.costs.link(Tier.DISK)
        sending = [read for read in self._reads if read.latency_s <= 0]
        self.clock.advance(seconds)
        for read in list(self._reads):
            if read not in sending:
                read.latency_s -= seconds
                if read.latency_s < 1e-9:
                    read.latency_s = 0.0
                continue
            read.left_bytes -= self.rate / len(sending) * seconds
            if read.left_bytes > 1:
                continue
            read.sections += 1
            link.arrived(self.clock.now(), int(read.section_bytes))
            read.left_bytes = read.section_bytes * self._noise()
            if read.sections == SECTIONS:
                self._reads.remove(read)
                link.ended(self.clock.now(), self.chunk_bytes)
                self.busy_times += link.idle

    def _noise(self) -> float:
        return 1 + self.random.uniform(-self.noise, self.noise)


def _key(index: int) -> ChunkKey:
    return ChunkKey(index.to_bytes(32, "little"))
