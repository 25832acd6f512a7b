"""A cache under foreign keys, by random steps against an oracle: never another byte.

What a payload holds follows from its key, its size and how often that key was deleted; so bytes of
another key, of before a delete, or of a slot's last tenant are recognised. How much is held is the
cache's affair; that it drains and keeps its books is checked.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.cache.keyed_transfer import Transfer
from kvtier.constants import HEALTH_BACKOFF_S_MAX, MIB
from kvtier.testing.clock import FakeClock
from kvtier.testing.fault_files import (
    FileGate,
    FileOperation,
)
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.disk_faults import CREATE, DISK_FAULTS, READ
from tests.lib.keyed_setup import (
    POISON,
    KeyedSetup,
    finished,
    payload,
    settle,
    written,
)

KEYS = [b"%d" % number for number in range(10)]
SIZES = (1, 100, 4096, 5000, 70_000, MIB + 5)
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
sizes = st.sampled_from(SIZES)


class KeyedMachine(RuleBasedStateMachine):
    """One face; puts and gets may stay under way while others begin."""

    @initialize(dram=st.sampled_from([100_000, 3 * MIB]), disk=st.sampled_from([None, 2, 16]))
    def start(self, dram: int, disk: int | None) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.setup = KeyedSetup(Path(self.temporary.name))
        self.clock = FakeClock()
        self.room = (dram, disk * MIB if disk else None)
        self.versions: Counter[bytes] = Counter()
        self.gate: FileGate | None = None
        self.puts: list[tuple[Transfer, list[bytes]]] = []
        self.gets: list[tuple[Transfer, list[bytes], list[bytearray], Counter[bytes]]] = []
        self.open()

    def open(self) -> None:
        dram, disk = self.room
        self.keyed, self.cache = self.setup.open(dram_bytes=dram, disk_bytes=disk, clock=self.clock)

    @rule(which=keys, nbytes=sizes, wait=st.booleans())
    def put(self, which: list[bytes], nbytes: int, *, wait: bool) -> None:
        items = [(key, payload(key, nbytes, self.versions[key])) for key in which]
        self.puts.append((self.keyed.put(items), which))
        if wait:
            self.end_puts()

    @rule(which=keys, nbytes=sizes, wait=st.sampled_from([True, True, False]))
    def get(self, which: list[bytes], nbytes: int, *, wait: bool) -> None:
        into = [bytearray([POISON]) * nbytes for _ in which]
        self.gets.append((self.keyed.get(which, into), which, into, self.versions.copy()))
        if wait:
            self.end_gets()

    @rule()
    def poll(self) -> None:
        for transfer in (*(put[0] for put in self.puts), *(get[0] for get in self.gets)):
            transfer.poll()

    @rule()
    def end_puts(self) -> None:
        self.open_gate()
        for transfer, _ in self.puts:
            for outcome in finished(transfer):
                assert isinstance(outcome, (Tier, MissReason))
        self.puts.clear()

    @rule()
    def end_gets(self) -> None:
        self.open_gate()
        for transfer, which, into, versions in self.gets:
            for key, data, outcome in zip(which, into, finished(transfer), strict=True):
                if isinstance(outcome, Tier):
                    right = payload(key, len(data), versions[key])
                    assert data == right, f"{key!r}: wrong bytes from {outcome}"
        self.gets.clear()

    @rule(which=keys)
    def delete(self, which: list[bytes]) -> None:
        """A put that is not over might store what was deleted once more, and rightly."""
        if any(transfer.poll() is None and {*keys} & {*which} for transfer, keys in self.puts):
            self.end_puts()
        self.keyed.delete(which)
        self.versions.update(which)
        assert self.keyed.contains(which) == [False] * len(which)

    @rule(at=st.integers(0, 1000), where=st.sampled_from([40, 4100, -1]))
    def spoil(self, at: int, where: int) -> None:
        self.drain()
        files = self.setup.shard_files()
        if files:
            path = files[at % len(files)]
            data = bytearray(path.read_bytes())
            data[where % len(data)] ^= 1
            path.write_bytes(data)

    @rule(fault=st.sampled_from(sorted(DISK_FAULTS)))
    def fail(self, fault: str) -> None:
        self.open_gate()
        self.setup.files.inject(DISK_FAULTS[fault])

    @rule(operations=st.sampled_from([READ, CREATE]))
    def hang(self, operations: tuple[FileOperation, ...]) -> None:
        """What is read or written from now on does not end until the gate is opened."""
        self.open_gate()
        self.gate = FileGate(operations=operations, path="" if operations == CREATE else ".kvs")
        self.setup.files.inject(self.gate)

    @rule()
    def open_gate(self) -> None:
        if self.gate is not None:
            self.gate.open()
            self.gate = None

    @rule(seconds=st.sampled_from([0.1, 1.0, HEALTH_BACKOFF_S_MAX]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.drain()
        self.setup.close(self.keyed)
        self.open()

    @rule()
    def close_in_the_middle(self) -> None:
        self.keyed.close()
        assert all(transfer.poll() is not None for transfer, _ in self.puts)
        self.puts.clear()
        self.end_gets()
        self.restart()

    def drain(self) -> None:
        """Everything ends and the disk is well, so that what was deleted is unlinked."""
        self.open_gate()
        self.setup.files.inject()
        self.end_puts()
        self.end_gets()
        self.clock.advance(HEALTH_BACKOFF_S_MAX)
        settle(self.cache)
        written(self.cache)

    def teardown(self) -> None:
        if not hasattr(self, "keyed"):
            return
        self.drain()
        self.keyed.contains(KEYS)
        settle(self.cache)
        assert tier_stats(self.cache, Tier.DRAM).pinned_chunks == 0
        self.setup.close(self.keyed)
        self.temporary.cleanup()


TestKeyedMachine = KeyedMachine.TestCase
EXAMPLES = settings.default.max_examples * 2 // 5 if settings.default else 40
TestKeyedMachine.settings = settings(stateful_step_count=30, max_examples=EXAMPLES)
