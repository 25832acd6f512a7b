"""Whatever comes and goes in whatever order, a reader believes nothing that is not there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.obs.events import Cleared, Content, EventLog, Removed
from kvtier.types import ChunkKey, KVLayout, Namespace, Tier

LAYOUT = KVLayout((), chunk_tokens=1)
#: A tree of chunks: each has one before it as its parent, or none.
CHUNKS = 9
PARENT = [None, 0, 1, 1, 0, None, 5, 6, 6]
TIERS = (Tier.DRAM, Tier.DISK)

Act = tuple[str, int, int]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "ready", "remove", "learn", "take", "anew", "end"]),
        st.integers(0, CHUNKS - 1),
        st.integers(0, 1),
    ),
    max_size=120,
)


def key(number: int, epoch: int) -> ChunkKey:
    return ChunkKey(bytes([number, epoch]) * 16)


class World:
    """What is where, as whoever acts knows it, and what a reader has been told."""

    def __init__(self) -> None:
        self.log = EventLog(queued_max=5, chunks_max=7)
        self.epoch = 0
        self.held: dict[tuple[ChunkKey, Tier], bool] = {}
        self.picture: set[tuple[ChunkKey, Tier]] = set()

    def act(self, word: str, number: int, tier: Tier) -> None:
        place = (key(number, self.epoch), tier)
        if word == "add" and place not in self.held:
            self.held[place] = False
            self.log.added(place[0])
        elif word == "ready" and self.held.get(place) is False:
            self.held[place] = True
            self.log.ready(*place)
        elif word == "remove" and place in self.held:
            del self.held[place]
            self.log.removed(*place)
        elif word == "learn" and self.log.wants(place[0]):
            self.log.learn(place[0], self._content(number))
        elif word == "take":
            self._read(2)
        elif word == "anew":
            self.log.begin_anew()
        elif word == "end":
            self.epoch = min(self.epoch + 1, 3)
            self.log.keep(lambda namespace: bytes([self.epoch]))

    def drain(self) -> None:
        while self._read(3):
            pass

    def _content(self, number: int) -> Content:
        above = PARENT[number]
        parent = None if above is None else key(above, self.epoch)
        return Content(Namespace("weights", LAYOUT), bytes([self.epoch]), parent, bytes(4))

    def _read(self, count: int) -> bool:
        events = self.log.take(count)
        for event in events:
            if isinstance(event, Cleared):
                self.picture.clear()
            elif isinstance(event, Removed):
                self.picture.remove((event.key, event.tier))
            else:
                parent = event.content.parent
                assert parent is None or any(parent == known for known, _ in self.picture)
                self.picture.add((event.key, event.tier))
        return bool(events)


@settings(max_examples=300, deadline=None)
@given(acts=ACTS)
def test_the_picture_is_a_part_of_the_truth(acts: Sequence[Act]) -> None:
    world = World()
    for word, number, tier in acts:
        world.act(word, number, TIERS[tier])
        world.log.check_integrity()
    world.drain()
    there = {place for place, ready in world.held.items() if ready}
    assert world.picture <= there
    assert {known for known, _ in world.picture} <= {
        key(number, world.epoch) for number in range(CHUNKS)
    }, "what has ended is taken back"


@settings(max_examples=200, deadline=None)
@given(acts=ACTS)
def test_everything_that_can_be_reached_and_is_known_is_told(acts: Sequence[Act]) -> None:
    world = World()
    for word, number, tier in acts:
        world.act(word if word != "end" else "take", number, TIERS[tier])
    for place in TIERS:
        for number in range(CHUNKS):
            world.act("remove", number, place)
    for number in (4, 3, 2, 1, 0):
        world.act("add", number, Tier.DISK)
        world.act("learn", number, Tier.DISK)
        world.act("ready", number, Tier.DISK)
    world.drain()
    assert world.picture == {(key(number, 0), Tier.DISK) for number in range(5)}
