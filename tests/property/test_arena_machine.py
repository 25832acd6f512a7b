"""The arena against a list of what was given out: slots never overlap, nothing is lost or wasted.

The numbered promises are those of the arena's own description.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.tiers.arena import Arena
from kvtier.types import Slot

PAGE = 4096
CAPACITY = 24 * PAGE
SLAB = 6 * PAGE


def slab_bytes(size: int) -> int:
    """Return the full length of a slab of slots of ``size`` bytes."""
    return max(SLAB - SLAB % size, size)


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY, slab_bytes=SLAB)
        self.live: dict[Slot, bytes] = {}
        self.given = 0
        self.most: Counter[int] = Counter()  # by size: the most bytes held at once

    @rule(pages=strategies.sampled_from((1, 1, 2, 3, 4, 5, 9, 24, 25)))
    def allocate(self, pages: int) -> None:
        slot = self.arena.allocate(pages * PAGE)
        if slot is None:
            self.check_refusal(pages * PAGE)
            return
        assert slot.nbytes == pages * PAGE
        assert slot.offset % PAGE == 0
        assert 0 <= slot.offset <= CAPACITY - slot.nbytes
        for other in self.live:
            apart = (
                slot.offset + slot.nbytes <= other.offset
                or other.offset + other.nbytes <= slot.offset
            )
            assert apart, f"{slot} overlaps {other}"
        self.given += 1
        pattern = self.given.to_bytes(4, "little")
        self.arena.view(slot)[:] = pattern * (slot.nbytes // 4)
        self.live[slot] = pattern
        self.most[slot.nbytes] = max(self.most[slot.nbytes], self.held()[slot.nbytes])

    def held(self) -> Counter[int]:
        """Return the bytes given out by size."""
        held: Counter[int] = Counter()
        for slot in self.live:
            held[slot.nbytes] += slot.nbytes
        return held

    def check_refusal(self, nbytes: int) -> None:
        """Promise 2: no slab of its size has a free slot, and no gap could hold one."""
        slabs = sorted(self.arena.slabs(), key=lambda slab: slab.offset)
        for slab in slabs:
            used = sum(slab.offset <= s.offset < slab.offset + slab.nbytes for s in self.live)
            assert slab.slot_bytes != nbytes or used == slab.slot_count, "a free slot was refused"
        position = 0
        for start, end in [(s.offset, s.offset + s.nbytes) for s in slabs] + [(CAPACITY, CAPACITY)]:
            assert start - position < nbytes, "a gap that is large enough was refused"
            position = end

    @precondition(lambda self: self.live)
    @rule(pick=strategies.integers(0, 30))
    def free(self, pick: int) -> None:
        slot = list(self.live)[pick % len(self.live)]
        pattern = self.live.pop(slot)
        assert bytes(self.arena.view(slot)) == pattern * (slot.nbytes // 4)
        self.arena.free(slot)

    @invariant()
    def books_agree(self) -> None:
        self.arena.check_integrity()
        assert self.arena.used_bytes == sum(slot.nbytes for slot in self.live)
        given = {(offset, slab.slot_bytes) for slab in self.arena.slabs() for offset in slab.used}
        assert given == {(slot.offset, slot.nbytes) for slot in self.live}

    @invariant()
    def no_size_has_a_slab_more_than_it_ever_needed(self) -> None:
        """Promise 1, and the arena knows which sizes have slots to spare."""
        slabs: Counter[int] = Counter()
        for slab in self.arena.slabs():
            slabs[slab.slot_bytes] += slab.nbytes
        held = self.held()
        assert slabs.keys() == held.keys()
        for size, nbytes in slabs.items():
            assert nbytes < self.most[size] + slab_bytes(size)
            assert self.arena.spare(size) == (nbytes - held[size] > slab_bytes(size))
        assert not self.arena.spare(7 * PAGE)

    def teardown(self) -> None:
        for slot in list(self.live):
            assert bytes(self.arena.view(slot)) == self.live[slot] * (slot.nbytes // 4)
            self.arena.free(slot)
        self.arena.check_integrity()
        # Everything has joined again: one slot may take the whole arena.
        assert self.arena.allocate(CAPACITY) == Slot(0, CAPACITY)
        self.arena.close()


ArenaMachine.TestCase.settings = settings(stateful_step_count=40)
TestArenaMachine = ArenaMachine.TestCase


@settings(max_examples=60)
@given(
    layouts=strategies.lists(
        strategies.lists(strategies.integers(1, 12), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    picks=strategies.lists(strategies.integers(0, 999), min_size=1, max_size=60),
    pages=strategies.integers(40, 150),
)
def test_a_refusal_leaves_less_than_one_slab_per_live_size(
    layouts: list[list[int]], picks: list[int], pages: int
) -> None:
    """Promise 3: chunks of several layouts come in, and are replaced by chunks of their layout."""
    arena = Arena(pages * PAGE, slab_bytes=SLAB)
    slots: list[Slot] = []
    refused = None
    for turn in range(10_000):
        pick = picks[turn % len(picks)]
        for size in layouts[pick % len(layouts)]:
            slot = arena.allocate(size * PAGE)
            if slot is None:
                refused = size * PAGE
                break
            slots.append(slot)
        if refused is not None:
            break
        old = slots[pick % len(slots)]
        _replace(arena, slots, old)
    assert refused is not None
    live = {slab.slot_bytes for slab in arena.slabs()} | {refused}
    unused = arena.capacity_bytes - sum(slot.nbytes for slot in slots)
    assert unused < sum(map(slab_bytes, live))
    arena.close()


def _replace(arena: Arena, slots: list[Slot], old: Slot) -> None:
    """Let a slot go whose slab keeps another, and take one of its size."""
    (slab,) = (s for s in arena.slabs() if s.offset <= old.offset < s.offset + s.nbytes)
    if len(slab.used) > 1:
        arena.free(old)
        slots.remove(old)
        again = arena.allocate(old.nbytes)
        assert again is not None, "a slot that was freed is there to be taken"
        slots.append(again)
