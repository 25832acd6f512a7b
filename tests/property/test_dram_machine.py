"""The DRAM tier under any order of events: bytes stay whose they are, pins hold, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume, given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease, State
from kvtier.types import ChunkKey, Entry, Features, ShardId, Slot

PAGE = 4096
CAPACITY = 24 * PAGE
SLAB = 4 * PAGE
#: Shard sizes in pages; the last chunks fit only when much has left, or not at all.
SHAPES = ((1,), (1,), (2,), (3,), (1, 2), (2, 1, 3), (5,), (12,), (24,), (25,))


class DramMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.tier = DramTier(
            Arena(CAPACITY, slab_bytes=SLAB), self.policy, self.clock, self.evicted
        )
        self.admitted = False
        self.patterns: dict[int, bytes] = {}  # by identity of the record
        self.held: dict[ChunkKey, DramRecord] = {}
        self.filling: list[DramRecord] = []
        self.leases: list[Lease[Slot]] = []
        self.count = 0

    def policy(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> LRU:
        """LRU, and a note whether it let the latest entry in."""
        machine = self

        class Noting(LRU):
            def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
                victims = super().admit(entry, now)
                machine.admitted = victims is not None
                return victims

        return Noting(capacity_bytes, pinned)

    def evicted(self, key: ChunkKey) -> None:
        record = self.held.pop(key)
        assert record.pins == 0
        assert record not in self.filling

    @rule(
        name=strategies.integers(0, 30),
        above=strategies.sampled_from((1, 2, 40)),
        shape=strategies.sampled_from(SHAPES),
    )
    def reserve(self, name: int, above: int, shape: tuple[int, ...]) -> None:
        key = chunk_key(name)
        if key in self.held:
            return
        parent = chunk_key(name - above) if name >= above else None
        sizes = {ShardId(0, 0, number): pages * PAGE for number, pages in enumerate(shape)}
        entry = Entry(key, parent, sum(sizes.values()), 0 if parent is None else 1)
        may_refuse = (
            any(record.pins for record in self.held.values())
            or self.tier.index.leaving_count > 0
            or (parent is not None and parent in self.held)
            or sum(shape) > 6
        )
        before = set(self.held)
        possible = self.room_for(parent, list(sizes.values()))
        self.clock.advance(1.0)
        record = self.tier.reserve(entry, b"n" * 32, "raw", sizes)
        line = parent
        while line is not None and line in before:
            assert line in self.held, "a prefix left for its own continuation"
            line = self.held[line].entry.parent
        if record is None:
            assert may_refuse, "refused although everything could leave"
            assert not (self.admitted and possible), "refused what evictions make room for"
            return
        self.count += 1
        pattern = self.count.to_bytes(4, "little")
        self.patterns[id(record)] = pattern
        for shard, slot in record.places.items():
            assert slot.nbytes == sizes[shard]
            self.tier.arena.view(slot)[:] = pattern * (slot.nbytes // 4)
        self.held[key] = record
        self.filling.append(record)

    def room_for(self, parent: ChunkKey | None, sizes: list[int]) -> bool:
        """Tell whether the tier promises room: for one shard exactly, for several at least."""
        stays: set[ChunkKey] = set()
        while parent is not None and parent in self.held:
            stays.add(parent)
            parent = self.held[parent].entry.parent
        leased = [record for lease in self.leases for record in lease.records]
        kept = {
            slot.offset
            for record in (*self.held.values(), *leased)
            if record.pins or record.state is not State.READY or record.entry.key in stays
            for slot in record.places.values()
        }
        slabs = sorted(self.tier.arena.slabs(), key=lambda slab: slab.offset)
        held = [slab for slab in slabs if slab.used & kept]
        if len(sizes) > 1:
            largest = max(sizes)
            outside = CAPACITY - sum(slab.nbytes for slab in held)
            slabs_bytes = len(sizes) * max(SLAB, largest)
            return outside >= slabs_bytes + (len(held) + len(sizes)) * largest
        (size,) = sizes
        starts = [0, *(slab.offset + slab.nbytes for slab in held)]
        ends = [*(slab.offset for slab in held), CAPACITY]
        return any(
            slab.slot_bytes == size and len(slab.used & kept) < slab.slot_count for slab in slabs
        ) or any(end - start >= size for start, end in zip(starts, ends, strict=True))

    @precondition(lambda self: self.filling)
    @rule(
        pick=strategies.integers(0, 9), end=strategies.sampled_from(("commit", "commit", "abort"))
    )
    def settle(self, pick: int, end: str) -> None:
        record = self.filling.pop(pick % len(self.filling))
        if end == "commit":
            self.tier.commit(record)
        else:
            del self.held[record.entry.key]
            self.tier.abort(record)

    @precondition(lambda self: self.held and len(self.leases) < 4)
    @rule(pick=strategies.integers(0, 30))
    def pin(self, pick: int) -> None:
        records = [r for r in self.held.values() if r.state is State.READY]
        if records:
            self.leases.append(self.tier.index.lease([records[pick % len(records)]]))

    @precondition(lambda self: self.leases)
    @rule(pick=strategies.integers(0, 9))
    def unpin(self, pick: int) -> None:
        self.leases.pop(pick % len(self.leases)).release()

    @precondition(lambda self: self.held)
    @rule(pick=strategies.integers(0, 30))
    def abandon(self, pick: int) -> None:
        records = [r for r in self.held.values() if r.state is State.READY]
        if records:
            record = records[pick % len(records)]
            del self.held[record.entry.key]
            self.tier.abandon(record)

    @rule(names=strategies.lists(strategies.integers(0, 31), max_size=4))
    def touch(self, names: list[int]) -> None:
        self.clock.advance(1.0)
        self.tier.touch([chunk_key(name) for name in names], Features())

    @invariant()
    def every_byte_is_its_owners(self) -> None:
        self.tier.check_integrity()
        assert {r.entry.key: r for r in self.tier.index} == self.held
        leased = [record for lease in self.leases for record in lease.records]
        for record in (*self.held.values(), *leased):
            for slot in record.places.values():
                expected = self.patterns[id(record)] * (slot.nbytes // 4)
                assert bytes(self.tier.arena.view(slot)) == expected
        live = {id(record): record for record in (*self.held.values(), *leased)}
        used = sum(s.nbytes for record in live.values() for s in record.places.values())
        assert self.tier.used_bytes == used

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        for record in self.filling:
            self.held.pop(record.entry.key)
            self.tier.abort(record)
        for record in list(self.held.values()):
            self.tier.leave(record)
        assert self.tier.used_bytes == 0
        assert self.tier.arena.slabs() == []
        assert self.tier.index.pinned_count == self.tier.index.leaving_count == 0
        self.tier.arena.close()


DramMachine.TestCase.settings = settings(stateful_step_count=40)
TestDramMachine = DramMachine.TestCase


@settings(max_examples=80)
@given(
    pages=strategies.lists(strategies.sampled_from((1, 2, 3)), min_size=40, max_size=60),
    gone=strategies.sets(strategies.integers(0, 59), min_size=10, max_size=50),
    pinned=strategies.sets(strategies.integers(0, 59), max_size=3),
    wanted=strategies.sampled_from((4, 5, 6)),
)
def test_the_emptiest_slab_of_a_size_with_slots_to_spare_goes_first(
    pages: list[int], gone: set[int], pinned: set[int], wanted: int
) -> None:
    """No chunk of a well packed size leaves while another size has more than a slab to spare."""
    left: list[ChunkKey] = []
    tier = DramTier(Arena(48 * PAGE, slab_bytes=6 * PAGE), LRU, FakeClock(), left.append)
    held: dict[int, DramRecord] = {}

    def store(name: int, size: int) -> DramRecord | None:
        entry = Entry(chunk_key(name), None, size * PAGE, 0)
        record = tier.reserve(entry, b"n" * 32, "raw", {ShardId(0, 0, 0): size * PAGE})
        if record is not None:
            tier.commit(record)
        return record

    for name, size in enumerate(pages):
        if tier.used_bytes + size * PAGE <= 48 * PAGE and not left:
            record = store(name, size)
            assert record is not None
            held[name] = record
    held = {name: record for name, record in held.items() if record.entry.key not in left}
    left.clear()
    for name in gone & held.keys():
        tier.abandon(held.pop(name))
    lease = tier.index.lease([held[name] for name in pinned & held.keys()])
    assume(tier.used_bytes + wanted * PAGE <= 48 * PAGE)
    fixed = {slot.offset for record in lease.records for slot in record.places.values()}
    shares = {  # Of the slabs that may be emptied, by offset of a slot: how much of it is held.
        offset: len(slab.used) / slab.slot_count
        for slab in tier.arena.slabs()
        if tier.arena.spare(slab.slot_bytes) and not slab.used & fixed
        for offset in slab.used
    }
    before = {record.entry.key: record for record in held.values()}
    store(99, wanted)
    if left and shares:
        (slot,) = before[left[0]].places.values()
        assert shares.get(slot.offset) == min(shares.values())
    lease.release()
    tier.check_integrity()
    tier.arena.close()
