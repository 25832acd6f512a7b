"""A cache over remotes that do anything: what a load says is valid is right, byte by byte.

The KV of a chunk follows from its key, so no model of what is held is needed; see the machine of a
cache. Whatever remotes answer, the books agree after each step, and at the end nothing is pinned.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.config import WriteMode
from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.errors import (
    ConnectorDataError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
    TierUnavailableError,
)
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import Loading, wait_until
from kvtier.types import KVLayout, Tier
from tests.lib.cache_setup import CHUNK, LAYOUT, SPLIT, WINDOWED, ranks, settle, tier_stats
from tests.lib.remote_lab import RemoteLab, ToyRemote

LAYOUTS: tuple[tuple[KVLayout, int], ...] = ((LAYOUT, 1), (WINDOWED, 1), (SPLIT, 2))
#: How often a load is polled before the clock is moved to its deadline.
PATIENCE = 60


def raises(_: Any) -> Any:
    raise KeyError("a bug of the connector")


LIES: dict[str, Any] = {
    "unavailable": lambda answer: [ConnectorUnavailableError("away") for _ in answer],
    "timeout": lambda answer: [ConnectorTimeoutError("late") for _ in answer],
    "refused": lambda answer: [ConnectorRefusedError("full") for _ in answer],
    "odd": lambda answer: [ConnectorDataError("odd") for _ in answer],
    "half": lambda answer: answer[: len(answer) // 2],
    "nothing": lambda _: None,
    "nan": lambda answer: [math.nan for _ in answer],
    "yes": lambda answer: [True for _ in answer],
    "no": lambda answer: [None for _ in answer],
    "raises": raises,
}
numbers = st.integers(0, 50)


def prompt(family: int, branch: int, chunks: int) -> list[int]:
    """Prompts of a family share two chunks; those of a branch share all that both have."""
    shared = list(range(1000 * family, 1000 * family + 2 * CHUNK))
    own = range(1000 * family + 100 * (branch + 1), 1000 * family + 100 * (branch + 1) + 8 * CHUNK)
    return (shared + list(own))[: chunks * CHUNK]


class RemoteMachine(RuleBasedStateMachine):
    """One engine on one cache, over remotes that outlive it."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        dram=st.integers(3, 10),
        disk=st.sampled_from([None, None, 4]),
        remotes=st.integers(1, 2),
        capacity=st.sampled_from([0, 0, 5]),
        mode=st.sampled_from(WriteMode),
        connections=st.integers(1, 3),
        byte_codecs=st.lists(st.sampled_from([None, "zstd"]), min_size=1, max_size=2),
        quota=st.sampled_from([0, 0, 12]),
    )
    def start(
        self,
        layout: tuple[KVLayout, int],
        dram: int,
        disk: int | None,
        remotes: int,
        capacity: int,
        mode: WriteMode,
        connections: int,
        byte_codecs: list[str | None],
        quota: int,
    ) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.lab = RemoteLab(Path(self.temporary.name), [ToyRemote() for _ in range(remotes)])
        self.loading: Loading | None = None
        self.capacity_bytes = capacity * 2 * 16384
        self.opened = partial(
            self.lab.open,
            layout[0],
            placements=ranks(layout[1]),
            clock=self.clock,
            dram_chunks=dram * 2,
            disk_chunks=None if disk is None else disk * 2,
            capacity_bytes=self.capacity_bytes,
            mode=mode,
            connections=connections,
            deadline_s=0.05,
            salt="ours",
            quota_chunks=quota,
        )
        # Whoever comes next may be configured otherwise, and reads it all the same.
        self.byte_codecs = itertools.cycle(byte_codecs)
        self.open()
        for family in range(3):
            self.engine.store(self.engine.sequence(prompt(family, 0, 5)))
        self.close()
        self.open()

    def open(self) -> None:
        self.engine = self.opened(byte_codec=next(self.byte_codecs))
        self.loading = None

    @rule(family=st.integers(0, 2), branch=st.integers(0, 1), chunks=st.integers(1, 6))
    def store(self, family: int, branch: int, chunks: int) -> None:
        if self.loading is None:
            self.engine.store(self.engine.sequence(prompt(family, branch, chunks)))

    @rule(
        family=st.integers(0, 2),
        branch=st.integers(0, 1),
        chunks=st.integers(1, 6),
        how=st.sampled_from(["drive", "drive", "hold", "prefetch"]),
        well=st.booleans(),
    )
    def load(self, family: int, branch: int, chunks: int, how: str, *, well: bool) -> None:
        if self.loading is not None:
            return
        if well:
            self.heal()
        match = self.match(prompt(family, branch, chunks))
        if how == "prefetch":
            self.engine.cache.prefetch(match)
            return
        self.loading = self.engine.begin_load(match)
        if self.loading is not None and how == "drive":
            self.drive()

    def match(self, tokens: list[int]) -> Any:
        """Ask until the answer, or until the patience is at its end."""
        sequence = self.engine.sequence(tokens)
        tries = iter(range(PATIENCE))

        def ready() -> bool:
            if next(tries, None) is None:
                self.clock.advance(1.0)
            return hasattr(self.engine.cache.match(sequence), "hits")

        wait_until(ready, "a lookup never answers")
        return self.engine.match(sequence)

    @rule(how=st.sampled_from(["step", "step", "cancel", "drive"]))
    def go_on(self, how: str) -> None:
        if self.loading is None:
            return
        if how == "step":
            self.engine.step(self.loading)
        elif how == "cancel":
            self.loading.load.cancel()
        else:
            self.drive()

    @rule(
        number=numbers,
        operation=st.sampled_from(["contains", "read", "read", "write", "write", "list"]),
        lie=st.sampled_from(sorted(LIES)),
    )
    def lie(self, number: int, operation: str, lie: str) -> None:
        self.lab.remotes[number % len(self.lab.remotes)].twist[operation] = LIES[lie]

    @rule(number=numbers, operation=st.sampled_from(["contains", "read", "write"]))
    def hang(self, number: int, operation: str) -> None:
        self.lab.remotes[number % len(self.lab.remotes)].hold(operation)

    @rule(number=numbers, how=st.sampled_from(["drop", "flip", "cut", "swap"]))
    def spoil(self, number: int, how: str) -> None:
        remote = self.lab.remotes[number % len(self.lab.remotes)]
        objects = remote.objects()
        if not objects:
            return
        names = sorted(objects)
        name, other = names[number % len(names)], names[(number + 1) % len(names)]
        data = bytearray(objects[name])
        if how == "drop":
            remote.drop(name)
        elif how == "swap":
            remote.put(name, objects[other])
        else:
            if data:
                data[(4096 * (1 + number % 3) + number * 7) % len(data)] ^= 4
            remote.put(name, bytes(data if how == "flip" else data[: number * 400]))

    @rule(
        what=st.sampled_from(["heal", "heal", "pass", "wait", "invalidate", "restart", "restart"])
    )
    def upset(self, what: str) -> None:
        if what == "heal":
            self.heal()
        elif what == "pass":
            self.clock.advance(3.0)
        elif what == "wait" and self.loading is None:
            self.heal()
            settle(self.engine)
        elif what == "invalidate":
            with contextlib.suppress(TierUnavailableError):  # Its disk may not be open yet.
                self.engine.cache.invalidate(self.engine.namespace)
        elif what == "restart":
            self.close()
            self.open()

    def heal(self) -> None:
        for remote in self.lab.remotes:
            remote.twist.clear()
            remote.release()
        self.clock.advance(HEALTH_BACKOFF_S_MAX)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.cache.check_integrity()
            stats = tier_stats(self.engine.cache, Tier.REMOTE)
            if self.capacity_bytes:
                assert stats.used_bytes <= 2 * stats.capacity_bytes

    def drive(self) -> None:
        """End the load, at its deadline if need be, and check every byte of the pools."""
        loading, self.loading = self.loading, None
        assert loading is not None
        tries = iter(range(PATIENCE))
        wait_until(lambda: self.engine.step(loading) or next(tries, None) is None, "a load hangs")
        if loading.load.outcome is None:
            self.clock.advance(5.0)
        self.engine.drive(loading)
        self.engine.check(loading)

    def close(self) -> None:
        if self.loading is not None:
            self.drive()
        self.heal()
        self.lab.close(self.engine, timeout_s=2.0)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.close()
            self.temporary.cleanup()


TestRemoteMachine = RemoteMachine.TestCase
EXAMPLES = settings.default.max_examples // 4 if settings.default else 25
TestRemoteMachine.settings = settings(stateful_step_count=25, max_examples=EXAMPLES)
