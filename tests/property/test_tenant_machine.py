"""Tenants over one cache: what each holds is counted to the byte, and stays within its quota.

The oracle counts by itself: the headers of the files on disk say under which root each lies, and
DRAM has nothing but the tenants' slots.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.shard_format import parse_header
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    idle,
    of_tenant,
    settle,
    tier_stats,
    written,
)

SALTS = ("one", "two", "three")
tenants = st.sampled_from(SALTS)
prompts = st.integers(0, 5)


class TenantMachine(RuleBasedStateMachine):
    """Three tenants, each with an engine of its own."""

    @initialize(
        quota=st.sampled_from([0, 3, 6]),
        dram=st.integers(4, 10),
        disk=st.sampled_from([None, 6, 24]),
    )
    def start(self, quota: int, dram: int, disk: int | None) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.setup = CacheSetup(Path(self.temporary.name))
        self.shape = (quota, dram, disk)
        self.roots: dict[bytes, str] = {}
        self.open()

    def open(self) -> None:
        quota, dram, disk = self.shape
        first = self.setup.open(
            salt=SALTS[0], dram_chunks=dram, disk_chunks=disk, quota_chunks=quota
        )
        first.match(first.sequence([]))
        self.cache = first.cache
        self.engines = {SALTS[0]: first} | {s: of_tenant(first, s) for s in SALTS[1:]}
        # Loads may put a tenant above its quota until it next stores.
        self.loaded: set[str] = set()

    def engine(self, salt: str, adapter: str) -> EngineDouble:
        engine = self.engines[salt]
        engine.namespace = replace(engine.namespace, adapter_id=adapter)
        self.roots[self.cache.root(engine.namespace)] = salt
        return engine

    @rule(
        salt=tenants, adapter=st.sampled_from(["", "a"]), prompt=prompts, chunks=st.integers(1, 5)
    )
    def store(self, salt: str, adapter: str, prompt: int, chunks: int) -> None:
        engine = self.engine(salt, adapter)
        held = {other: self.cache.tenants.nbytes(other) for other in SALTS if other != salt}
        sequence = engine.sequence(range(1000 * prompt, 1000 * prompt + chunks * CHUNK))
        stored = engine.begin_store(sequence, range(chunks))
        if stored is not None:
            if self.shape[0]:
                assert self.cache.tenants.nbytes(salt) <= self.shape[0] * CHUNK_BYTES
            engine.run(stored)
        written(engine)
        self.loaded.discard(salt)
        if self.room_for_all and sequence.refused is MissReason.QUOTA:
            after = {other: self.cache.tenants.nbytes(other) for other in held}
            assert after == held, "another tenant gave way"
        self.count()

    @property
    def room_for_all(self) -> bool:
        quota, dram, disk = self.shape
        return bool(quota) and len(SALTS) * quota <= min(dram, disk or dram)

    @rule(
        salt=tenants, adapter=st.sampled_from(["", "a"]), prompt=prompts, chunks=st.integers(1, 5)
    )
    def load(self, salt: str, adapter: str, prompt: int, chunks: int) -> None:
        engine = self.engine(salt, adapter)
        tokens = range(1000 * prompt, 1000 * prompt + chunks * CHUNK)
        match = engine.match(engine.sequence(tokens))
        if match.hits:
            engine.load(match)
            self.loaded.add(salt)
        written(engine)
        self.count()

    @rule(salt=tenants)
    def delete(self, salt: str) -> None:
        self.cache.tenants.delete(salt)
        for adapter in ("", "a"):
            engine = self.engine(salt, adapter)
            for prompt in range(6):
                assert not engine.match(
                    engine.sequence(range(1000 * prompt, 1000 * prompt + 40))
                ).hits
        wait_until(lambda: not self.cache.tenants.reclaimable_bytes, "nothing is given back")
        assert self.cache.tenants.nbytes(salt) == 0
        self.count()

    @rule()
    def restart(self) -> None:
        for salt in SALTS[1:]:
            self.engines[salt].close()
        self.setup.close(self.engines[SALTS[0]])
        self.open()
        wait_until(lambda: idle(self.cache.stats()), "not idle")
        self.count()

    def count(self) -> None:
        """Compare what the cache says with what there is."""
        settle(self.engines[SALTS[0]])
        told = {salt: self.cache.tenants.nbytes(salt) for salt in SALTS}
        in_dram = tier_stats(self.cache, Tier.DRAM).used_bytes
        on_disk: Counter[str] = Counter()
        if self.shape[2] is not None:
            wait_until(self.unlinked, "files stay")
            for path in self.setup.shard_files():
                header = parse_header(memoryview(path.read_bytes()))
                on_disk[self.roots[header.namespace]] += path.stat().st_size
        assert sum(told.values()) == in_dram + sum(on_disk.values())
        for salt in SALTS:
            assert told[salt] >= on_disk[salt]
            if self.shape[0] and salt not in self.loaded:
                assert told[salt] <= self.shape[0] * CHUNK_BYTES

    def unlinked(self) -> bool:
        return (
            self.setup.disk_bytes()
            == sum(self.cache.tenants.nbytes(salt) for salt in SALTS)
            - tier_stats(self.cache, Tier.DRAM).used_bytes
        )

    def teardown(self) -> None:
        for salt in SALTS[1:]:
            self.engines[salt].close()
        self.setup.close_all()
        self.temporary.cleanup()


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
