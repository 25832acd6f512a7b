"""A made-up chunk goes through every codec before the first real one, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.warm_up import warm_up, warm_up_bytes
from kvtier.cache.worker import CacheWorker
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.centred import blank_calibration, codec_for
from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier.interfaces import PagedPool
from kvtier.testing.pools import TorchPool
from kvtier.types import (
    Fidelity,
    GroupKind,
    KVGroup,
    KVLayout,
    Move,
    Namespace,
    Part,
    Placement,
    Plan,
    Result,
)

GROUP = KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
LAYOUT = KVLayout((GROUP,), chunk_tokens=32)
ROPE = "kind=default;layout=half;dim=64;theta=10000.0"
NAMESPACE = Namespace("weights", LAYOUT, rope=ROPE, fidelity=Fidelity.LOSSY)


class Told(CacheWorker):
    """Remembers what it was asked for."""

    def execute(self, plan: Plan) -> None:
        self.plans = [*getattr(self, "plans", []), plan]
        super().execute(plan)

    def poll(self) -> list[Result]:
        answers = super().poll()
        self.answers = [*getattr(self, "answers", []), *answers]
        return answers


class Mute(CacheWorker):
    """Takes plans and never answers."""

    def execute(self, plan: Plan) -> None:
        del plan


def pool() -> TorchPool:
    made = TorchPool([GROUP], block_count=4, block_tokens=16)
    for layer in range(2):
        made.layer_view(0, layer, Part.K).zero_()
        made.layer_view(0, layer, Part.V).zero_()
    return made


def warm(cache: Cache, worker: CacheWorker, *names: str) -> None:
    warm_up(worker, cache.codecs, names, LAYOUT, block_tokens=16, arena_bytes=cache.arena.nbytes)


def test_every_codec_packs_and_unpacks_once_and_nothing_is_held_or_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Move] = []

    def observe(calibrator: Calibrator, pool: PagedPool, move: Move) -> None:
        del calibrator, pool
        seen.append(move)

    monkeypatch.setattr(Calibrator, "observe", observe)
    cache = Cache(CacheConfig(4 * MIB, codec="int4", slab_bytes=MIB))
    worker = Told(Placement(), cache.arena, codecs=cache.codecs)
    worker.register_pool(pool())
    assert cache.codecs.find(NAMESPACE, ["int4"]) == ["int4"]
    names = cache.codecs.foreseen(NAMESPACE, ["raw", "int8", "int4"])
    warm(cache, worker, *names)
    cache.prepare(NAMESPACE)
    blank = codec_for("int4", blank_calibration(NAMESPACE)).name
    assert names == ["raw", "int8", "int5k4v", "int6", blank]
    assert [{move.codec for move in plan.moves} for plan in worker.plans] == [
        {name} for name in names for _ in ("first chunk", "later one") for _ in ("store", "load")
    ]
    assert [result.ok for result in worker.answers] == [True] * len(worker.plans)
    assert cache.codecs.packing("int4", NAMESPACE) == "int5k4v", "nothing is learned yet"
    assert seen == [], "what it moved is no model's KV"
    assert worker.poll() == []
    assert cache.stats().tiers[0].used_bytes == 0
    worker.close()
    cache.close()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """WARM_UP_S_MAX: a server starts without it."""
    monkeypatch.setattr("kvtier.cache.warm_up.WARM_UP_S_MAX", 0.01)
    cache = Cache(CacheConfig(4 * MIB, slab_bytes=MIB))
    worker = Mute(Placement(), cache.arena)
    worker.register_pool(pool())
    warm(cache, worker, "raw")
    worker.close()
    cache.close()


def test_a_chunk_that_the_arena_does_not_hold_is_left_out() -> None:
    cache = Cache(CacheConfig(4096, slab_bytes=4096))
    worker = Told(Placement(), cache.arena)
    worker.register_pool(pool())
    warm(cache, worker, "raw")
    assert not hasattr(worker, "plans")
    worker.close()
    cache.close()


@pytest.mark.parametrize(
    ("stored", "rank", "degree", "ways"),
    [
        (1, 0, 1, ["store", "load"]),
        (2, 1, 2, ["store", "load"]),
        (2, 0, 1, ["store", "load"]),
        # Parts of what others store, and a replica.
        (1, 1, 2, ["load"]),
        (2, 1, 4, ["load"]),
    ],
)
def test_a_rank_moves_its_own_part(stored: int, rank: int, degree: int, ways: list[str]) -> None:
    layout = replace(LAYOUT, head_groups=stored)
    ranks = [Placement(each, each, degree) for each in range(degree)]
    codecs = KnownCodecs()
    nbytes = warm_up_bytes(codecs, ["raw"], layout, ranks[rank])
    heads = max(1, 2 // degree)
    local = TorchPool([replace(GROUP, kv_heads=heads)], block_count=4, block_tokens=16)
    worker = Told(ranks[rank], memoryview(bytearray(nbytes)), codecs=codecs)
    worker.register_pool(local)
    warm_up(
        worker,
        codecs,
        ["raw"],
        layout,
        block_tokens=16,
        arena_bytes=nbytes,
        placement=ranks[rank],
        workers=ranks,
    )
    assert [plan.direction for plan in worker.plans] == ways * 2
    assert [result.ok for result in worker.answers] == [True] * len(worker.plans)
    moves = [move for plan in worker.plans for move in plan.moves]
    assert {move.worker for move in moves} == {rank}
    assert sum(move.heads.count for move in moves) == heads * len(worker.plans)
    worker.close()
