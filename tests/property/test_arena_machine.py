"""The arena against a list of what was given out: slots never overlap, nothing is lost."""

from __future__ import annotations

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.tiers.arena import Arena
from kvtier.types import Slot

PAGE = 4096
CAPACITY = 24 * PAGE
SLAB = 6 * PAGE


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY, slab_bytes=SLAB)
        self.live: dict[Slot, bytes] = {}
        self.given = 0

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

    def check_refusal(self, nbytes: int) -> None:
        """A slot is refused only when no slab of its size has one and no gap could hold one."""
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
