"""A worker page-locks the arena for a pool on a GPU, once, until it is closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.cache.worker import CacheWorker
from kvtier.testing.pools import TorchPool
from kvtier.tiers.window import Window
from kvtier.types import Part, Placement
from kvtier_kernels import pinned
from tests.lib.cache_setup import BLOCK, FULL

ARENA_BYTES = 4096


class CudaView:
    """What a worker asks of a view before any plan."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class CudaPool:
    """A pool that lies on a GPU, as far as one can see."""

    block_tokens = BLOCK
    block_count = 8
    stream = 0

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        return CudaView()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def register(memory: memoryview) -> bool:
        made.append("register")
        return len(memory) == ARENA_BYTES

    monkeypatch.setattr(pinned, "register", register)
    monkeypatch.setattr(pinned, "unregister", lambda _: made.append("unregister"))
    return made


@pytest.fixture
def worker() -> Iterator[CacheWorker]:
    made = CacheWorker(Placement(), memoryview(bytearray(ARENA_BYTES)))
    yield made
    made.close()


def test_the_arena_is_locked_once_and_unlocked_at_the_end(
    worker: CacheWorker, calls: list[str]
) -> None:
    worker.register_pool(CudaPool())
    worker.register_pool(CudaPool())
    assert calls == ["register"]
    worker.close()
    worker.close()
    assert calls == ["register", "unregister"]


def test_what_was_refused_is_neither_asked_again_nor_undone(calls: list[str]) -> None:
    worker = CacheWorker(Placement(), memoryview(bytearray(2 * ARENA_BYTES)))
    worker.register_pool(CudaPool())
    worker.register_pool(CudaPool())
    worker.close()
    assert calls == ["register"]


def test_an_arena_that_was_closed_first_is_unlocked_all_the_same(calls: list[str]) -> None:
    arena = memoryview(bytearray(ARENA_BYTES))
    worker = CacheWorker(Placement(), arena)
    worker.register_pool(CudaPool())
    arena.release()
    worker.close()
    assert calls == ["register", "unregister"]


def test_a_pool_on_the_cpu_locks_nothing(worker: CacheWorker, calls: list[str]) -> None:
    worker.register_pool(TorchPool([FULL], block_count=8, block_tokens=BLOCK))
    worker.close()
    assert calls == []


def test_what_is_lent_is_read_by_workers_with_a_pool_in_the_hosts_memory(calls: list[str]) -> None:
    """A GPU copies from what is page-locked, and what others lend is not."""
    window = Window(ARENA_BYTES)
    worker = CacheWorker(Placement(), memoryview(bytearray(ARENA_BYTES)), window=window)
    assert not window.serves([Placement()])
    worker.register_pool(TorchPool([FULL], block_count=8, block_tokens=BLOCK))
    assert window.serves([Placement()])
    worker.register_pool(CudaPool())
    assert not window.serves([Placement()])
    worker.close()
    assert calls == ["register", "unregister"]
