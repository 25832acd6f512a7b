"""vLLM's jobs over a cache: each comes back once, in time, and a promotion is right or failed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier_adapters import vllm_tier
from kvtier_adapters.payloads import runner
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.limits import JOBS_MAX
from kvtier_adapters.vllm_tier.desk import Finished, TierDesk
from kvtier_adapters.vllm_tier.doubts import Doubts
from kvtier_adapters.vllm_tier.limits import DOUBT_S, DOUBTS_MAX, DRAIN_EXTRA_S, STORES_ACTIVE_MAX
from kvtier_adapters.vllm_tier.scheme import chunk_scheme, cpu_flags, device_text
from kvtier_adapters.vllm_tier.versions import TESTED, check_version
from tests.lib.keyed_setup import payload
from tests.lib.plug_setup import PlugSetup, plug_setup, settled, written

NBYTES = 8192
READ = (FileOperation.READ,)
WAIT_S = 20.0


class Tier:
    """A desk and vLLM's rows of chunks."""

    def __init__(self, setup: PlugSetup, **options: Any) -> None:
        self.store = setup.store("vllm", **options)
        self.complaints = Complaints("test", SystemClock())
        self.desk = TierDesk(self.store, "chunks", self.complaints)
        self.rows = memoryview(bytearray(64 * NBYTES))
        self.jobs = 0
        self.back: list[Finished] = []

    def row(self, number: int) -> memoryview:
        return self.rows[number * NBYTES : (number + 1) * NBYTES]

    def submit_store(self, *keys: bytes) -> int:
        for number, key in enumerate(keys):
            self.row(number)[:] = payload(key, NBYTES)
        self.jobs += 1
        self.desk.store(self.jobs, keys, [self.row(n) for n in range(len(keys))])
        return self.jobs

    def submit_load(self, *keys: bytes) -> int:
        self.jobs += 1
        self.desk.load(self.jobs, keys, [self.row(32 + n) for n in range(len(keys))])
        return self.jobs

    def wait(self, job_id: int) -> Finished:
        wait_until(self.collect, "a job did not come back")
        (one,), self.back = self.back, []
        assert one.job_id == job_id
        return one

    def collect(self) -> bool:
        """Take what came back; tells whether all did."""
        self.back += self.desk.take_finished()
        return self.desk.open_jobs == 0

    def put(self, *keys: bytes) -> tuple[bytes, ...]:
        return self.wait(self.submit_store(*keys)).good

    def get(self, *keys: bytes) -> tuple[bytes, ...]:
        self.rows[32 * NBYTES :] = bytes(32 * NBYTES)
        done = self.wait(self.submit_load(*keys))
        for number, key in enumerate(keys):
            if key in done.good:
                assert self.row(32 + number) == payload(key, NBYTES), f"{key!r}: wrong bytes"
        assert done.complete == (len(done.good) == len(keys))
        return done.good


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[PlugSetup]:
    with plug_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def tier(setup: PlugSetup) -> Iterator[Tier]:
    tier = Tier(setup)
    yield tier
    setup.files.inject()
    settled(tier.store)
    tier.desk.close()


def restarted(setup: PlugSetup, *keys: bytes, **options: Any) -> Tier:
    before = Tier(setup)
    before.put(*keys)
    written(before.store)
    before.desk.close()
    return Tier(setup, **options)


def test_chunks_come_back_from_dram_and_after_a_restart_from_disk(setup: PlugSetup) -> None:
    tier = restarted(setup, b"a", b"b")
    assert [tier.desk.held(key) for key in (b"a", b"b", b"c")] == [True, True, False]
    assert tier.get(b"b", b"c", b"a") == (b"b", b"a")
    assert tier.put(b"c", b"a") == (b"c", b"a")
    assert tier.get(b"a", b"b", b"c") == (b"a", b"b", b"c")
    assert tier.desk.open_jobs == 0
    tier.desk.close()


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_b44_b78_b129_corrupt_chunks_fail_and_are_held_no_more(setup: PlugSetup, how: str) -> None:
    """vLLM asks again after a failed promotion: then it must hear of a miss, or it never ends."""
    keys = (b"a", b"b", b"c")
    tier = restarted(setup, *keys)
    for path in setup.shard_files():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        if how == "cut":
            del data[4096:]
        path.unlink() if how == "gone" else path.write_bytes(data)
    assert tier.get(*keys) == ()
    assert [tier.desk.held(key) for key in keys] == [False] * 3
    assert tier.put(*keys) == keys
    assert [tier.desk.held(key) for key in keys] == [True] * 3
    assert tier.get(*keys) == keys
    tier.desk.close()


def test_b129_a_disk_that_hangs_fails_a_promotion_once(setup: PlugSetup) -> None:
    tier = restarted(setup, b"a", load_deadline_s=0.2)
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    assert tier.desk.held(b"a")
    start = tier.store.clock.now()
    assert tier.get(b"a") == ()
    assert tier.store.clock.now() - start < WAIT_S / 2
    assert tier.desk.held(b"a") is False, "and not to be waited for once more"
    gate.open()
    settled(tier.store)
    assert not any(tier.rows[32 * NBYTES :]), "the chunk has another owner by now"
    tier.desk.close()


def test_every_job_comes_back_exactly_once(setup: PlugSetup, tier: Tier) -> None:
    """Good ones, failed ones, unreadable ones, and those that are one too many."""
    gate = FileGate(operations=(FileOperation.CREATE,), path=".kvs")
    setup.files.inject(gate)
    jobs = [tier.submit_store(b"%d" % number) for number in range(3 * STORES_ACTIVE_MAX)]
    jobs += [tier.submit_load(b"%d" % number, b"nowhere") for number in range(8)]
    tier.desk.fail(999, 3)
    gate.open()
    wait_until(tier.collect, "a job did not come back")
    back = tier.back
    assert sorted(done.job_id for done in back) == [*jobs, 999]
    assert not any(done.complete for done in back if done.job_id > jobs[-9])
    assert tier.desk.take_finished() == []


def test_jobs_beyond_the_bound_come_back_failed(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JOBS_MAX > 16
    monkeypatch.setattr(runner, "JOBS_MAX", 16)
    keys = tuple(b"%d" % number for number in range(30))
    count = 100
    for _ in range(count):
        tier.submit_load(*keys)
    wait_until(tier.collect, "a job did not come back")
    back = tier.back
    assert len({done.job_id for done in back}) == len(back) == count
    assert not any(done.good for done in back)


def test_drain_waits_for_jobs_and_forgetting_forgets(setup: PlugSetup, tier: Tier) -> None:
    job = tier.submit_store(b"a", b"b")
    assert tier.desk.drain()
    (done,) = tier.desk.take_finished()
    assert (done.job_id, done.complete) == (job, True)
    assert DRAIN_EXTRA_S > 0
    tier.desk.forget_all()
    assert tier.desk.held(b"a") is False
    assert tier.get(b"a", b"b") == ()


def test_close_while_jobs_run_has_them_come_back(setup: PlugSetup) -> None:
    tier = restarted(setup, b"a")
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    job = tier.submit_load(b"a")
    gate.wait_for_arrivals()
    closing = threading.Thread(target=tier.desk.close)
    closing.start()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [done.job_id for done in tier.desk.take_finished()] == [job]
    late = tier.submit_load(b"a")
    assert tier.wait(late).good == ()
    assert tier.desk.held(b"x" * 5000) is False, "a key that cannot be is not held"


# Doubts


def test_what_failed_is_doubted_for_a_while_unless_it_is_stored() -> None:
    clock, doubts = FakeClock(), Doubts(1.0)
    doubts.failed([b"a", b"b"], clock.now())
    doubts.stored([b"b"])
    assert doubts.doubted(b"a", clock.now())
    assert not doubts.doubted(b"b", clock.now())
    clock.advance(DOUBT_S)
    assert not doubts.doubted(b"a", clock.now())
    assert len(doubts) == 0


def test_b128_a_lookup_that_nobody_answers_is_a_miss_in_time() -> None:
    clock, doubts = FakeClock(), Doubts(1.0)
    assert doubts.answer(b"a", None, clock.now()) is None
    clock.advance(0.6)
    assert doubts.answer(b"a", None, clock.now()) is None
    assert doubts.answer(b"b", True, clock.now()) is True
    clock.advance(0.6)
    assert doubts.answer(b"a", None, clock.now()) is False
    assert doubts.answer(b"a", None, clock.now()) is None, "it is asked anew"
    assert doubts.answer(b"a", False, clock.now()) is False
    assert len(doubts) == 0


def test_doubts_are_bounded() -> None:
    doubts = Doubts(1.0)
    keys = [b"%d" % number for number in range(DOUBTS_MAX + 1)]
    doubts.failed(keys, 0.0)
    assert not doubts.doubted(keys[0], 0.0)
    assert doubts.doubted(keys[1], 0.0)
    for key in keys:
        doubts.answer(key, None, 0.0)
    assert len(doubts) == 2 * DOUBTS_MAX


# Schemes


@dataclass(frozen=True)
class Config:
    """The fields of vLLM's ``OffloadingConfig`` that tell chunks apart."""

    model: Any = field(default_factory=lambda: SimpleNamespace(name="org/model", dtype="bfloat16"))
    groups: Any = (SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"), group_id=0),)
    cache: Any = field(
        default_factory=lambda: SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)
    )
    parallel: Any = field(
        default_factory=lambda: SimpleNamespace(tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)
    )
    kv_cache_layout: str = "LBHNC"
    canonical_layout: bool = False
    replicated_layout: bool = False


def test_b16_b27_b132_whatever_a_chunk_depends_on_tells_it_apart() -> None:
    config = Config()
    group = config.groups[0]

    def of(
        changed: Config, nbytes: int = 4096, version: str = "0.32.0", device: str = "cuda"
    ) -> str:
        return chunk_scheme(changed, nbytes, version, device)

    schemes = [
        of(config),
        of(config, nbytes=8192),
        of(config, version="0.33.0"),
        of(config, device=device_text("cpu", "avx2")),
        of(config, device=device_text("cpu", "avx2 avx512f")),
        of(replace(config, kv_cache_layout="BLHNC")),
        of(replace(config, canonical_layout=True)),
        of(replace(config, replicated_layout=True)),
        of(replace(config, model=SimpleNamespace(name="org/other", dtype="bfloat16"))),
        of(replace(config, model=SimpleNamespace(name="org/model", dtype="float16"))),
        of(replace(config, cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2))),
        of(replace(config, groups=(group, group))),
        of(replace(config, groups=(SimpleNamespace(tokens_per_block=16, layer_names=("a",)),))),
        of(replace(config, parallel=SimpleNamespace(tp_size=4, pp_size=1, pcp_size=1, dcp_size=1))),
    ]
    for one, other in combinations(schemes, 2):
        assert one != other
    assert of(Config()) == of(Config())


def test_the_instruction_sets_of_a_cpu_are_found() -> None:
    text = "processor\t: 0\nflags\t\t: sse avx2 fma\n\nprocessor\t: 1\nflags\t\t: other\n"
    assert cpu_flags(text) == "avx2 fma sse"
    assert cpu_flags("Features : asimd\n") == "asimd"
    assert cpu_flags("processor : 0\n") == ""
    assert device_text("cuda", "avx2") == "cuda"


def test_versions_that_were_not_tried_are_refused_unless_forced() -> None:
    assert TESTED == ((0, 32),)
    check_version("0.32.1", forced=False)
    for other in ("0.26.0", "0.33.0", "dev"):
        with pytest.raises(ConfigError, match=r"secondary tier is tested with 0.32;.*any_version"):
            check_version(other, forced=False)
        check_version(other, forced=True)


def test_an_older_vllm_is_named_where_it_misses_what_the_tier_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.26 has no ``Medium``: what a user reads is that it is 0.26."""
    older = ModuleType("vllm")
    older.__dict__["__version__"] = "0.26.0"
    monkeypatch.setitem(sys.modules, "vllm", older)
    with pytest.raises(ConfigError, match=r"vLLM 0.26.0: the secondary tier"):
        _ = vllm_tier.KVTierTier
