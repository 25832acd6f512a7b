"""Pages of SGLang's pools over a cache: they come back as they were, in time, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.clock import SystemClock
from kvtier.errors import LayoutError
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.sglang.desk import KV, PageDesk
from kvtier_adapters.sglang.hits import ALL_PAGES, TRAILING_PAGES
from kvtier_adapters.sglang.limits import FIGURES_MAX, LOOKUP_PAGES_MAX
from tests.lib.hicache_double import PageFirstPool, StorageConfig
from tests.lib.plug_setup import PlugSetup, plug_setup, settled, written

READ = (FileOperation.READ,)
WAIT_S = 20.0


class Server:
    """A desk with one pool of KV, over a store of its own."""

    def __init__(
        self, setup: PlugSetup, config: StorageConfig | None = None, **options: Any
    ) -> None:
        self.store = setup.store("sglang", **options)
        self.complaints = Complaints("test", SystemClock())
        self.desk = PageDesk(self.store, config or StorageConfig(), self.complaints)
        self.pool = PageFirstPool()
        self.pool.fill(1)
        self.desk.register(KV, self.pool, torch.arange(self.pool.page_size))

    def put(self, **pages: int) -> list[bool]:
        return self.desk.put(KV, list(pages), self.pool.slots(*pages.values()))

    def get(self, **pages: int) -> list[bool]:
        return self.desk.get(KV, list(pages), self.pool.slots(*pages.values()))


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[PlugSetup]:
    with plug_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def server(setup: PlugSetup) -> Iterator[Server]:
    server = Server(setup)
    yield server
    setup.files.inject()
    settled(server.store)
    server.desk.close()


def test_pages_come_back_into_other_slots(server: Server) -> None:
    pool = server.pool
    before = {name: pool.page(number) for name, number in {"a": 0, "b": 1, "c": 2}.items()}
    assert server.put(a=0, b=1, c=2) == [True] * 3
    assert server.desk.prefix(["a", "b", "c", "x", "a"]) == 3
    assert server.get(c=9, x=10, a=11) == [True, False, True]
    assert torch.equal(pool.page(9), before["c"])
    assert torch.equal(pool.page(11), before["a"])
    assert server.put(a=5) == [True], "what is held stays, and counts as stored"
    assert server.get(a=12) == [True]
    assert torch.equal(pool.page(12), before["a"])
    (got, *_), (put, *_) = server.desk.take_moved("get"), server.desk.take_moved("put")
    assert (got.pages, put.pages) == (3, 3)
    assert got.gigabytes_per_s > 0
    assert server.desk.take_moved("get") == []


def test_b74_a_page_that_is_missing_moves_no_other(server: Server) -> None:
    pool = server.pool
    wanted = {name: pool.page(number) for name, number in {"a": 0, "c": 2}.items()}
    server.put(a=0, c=2)
    assert server.get(a=4, b=5, c=6, d=7) == [True, False, True, False]
    assert torch.equal(pool.page(4), wanted["a"])
    assert torch.equal(pool.page(6), wanted["c"])


def test_after_a_restart_pages_come_from_disk(setup: PlugSetup) -> None:
    before = Server(setup)
    names = {f"k{n}": n for n in range(16)}
    assert all(before.put(**names))
    written(before.store)
    before.desk.close()
    after = Server(setup)
    wanted = after.pool.kv_buffer.clone()
    after.pool.kv_buffer.zero_()
    assert after.desk.prefix(list(names)) == 16
    assert all(after.get(**names))
    assert torch.equal(after.pool.kv_buffer, wanted)
    after.desk.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(StorageConfig(), tp_size=2, tp_rank=1),
        replace(StorageConfig(), model_name="org/other"),
    ],
)
def test_b27_servers_that_differ_share_nothing(setup: PlugSetup, other: StorageConfig) -> None:
    before = Server(setup)
    before.put(a=0)
    written(before.store)
    before.desk.close()
    after = Server(setup, other)
    assert after.desk.prefix(["a"]) == 0
    assert after.get(a=3) == [False]
    after.desk.close()


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_b44_b78_corrupt_pages_are_misses_and_are_written_again(setup: PlugSetup, how: str) -> None:
    before = Server(setup)
    before.put(a=0, b=1)
    written(before.store)
    before.desk.close()
    server = Server(setup)
    for path in setup.shard_files():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        if how == "cut":
            del data[-4096:]
        path.unlink() if how == "gone" else path.write_bytes(data)
    assert server.get(a=3, b=4) == [False, False]
    assert server.desk.prefix(["a", "b"]) == 0
    assert server.put(a=0, b=1) == [True, True]
    assert server.get(a=3, b=4) == [True, True]
    server.desk.close()


def test_b111_a_disk_that_hangs_costs_the_deadline_and_nothing_is_written_late(
    setup: PlugSetup,
) -> None:
    before = Server(setup)
    before.put(a=0)
    written(before.store)
    before.desk.close()
    server = Server(setup, load_deadline_s=0.2)
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    server.pool.kv_buffer.zero_()
    start = server.store.clock.now()
    assert server.get(a=3) == [False]
    assert server.store.clock.now() - start < WAIT_S / 2
    gate.open()
    settled(server.store)
    assert not server.pool.kv_buffer.any(), "the page has another owner by now"
    server.desk.close()


def test_close_ends_a_call_that_waits(setup: PlugSetup) -> None:
    before = Server(setup)
    before.put(a=0)
    written(before.store)
    before.desk.close()
    server = Server(setup)
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    answers: list[list[bool]] = []
    reading = threading.Thread(target=lambda: answers.append(server.get(a=3)))
    reading.start()
    gate.wait_for_arrivals()
    closing = threading.Thread(target=server.desk.close)
    closing.start()
    reading.join(WAIT_S)
    gate.open()
    closing.join(WAIT_S)
    assert answers == [[False]]


def test_several_pools_have_a_say(server: Server) -> None:
    pool, state = server.pool, PageFirstPool(dim=8)
    state.fill(2)
    server.desk.register("mamba", state, torch.arange(state.page_size))
    keys = [f"k{n}" for n in range(4)]
    assert all(server.desk.put(KV, keys, pool.slots(0, 1, 2, 3)))
    wanted = [("mamba", TRAILING_PAGES, 1)]
    assert server.desk.found(keys, wanted) == ([], {KV: 4, "mamba": 0})
    assert server.desk.put("mamba", [keys[2]], state.slots(5)) == [True]
    assert server.desk.found(keys, wanted) == ([3], {KV: 4, "mamba": 3})
    assert server.desk.found(keys, [("mamba", ALL_PAGES, 1)]) == ([], {KV: 4, "mamba": 0})
    assert server.desk.found(keys, [("unknown", ALL_PAGES, 1)]) == ([], {KV: 4, "unknown": 0})
    assert server.desk.found(keys, []) == ([1, 2, 3, 4], {KV: 4})
    assert server.desk.get("mamba", [keys[2]], state.slots(9)) == [True]
    assert torch.equal(state.page(9), state.page(5))


def test_flat_pages_are_apart_from_those_in_the_pool(server: Server) -> None:
    values = [torch.randn(64), torch.randn(64)]
    server.put(a=0)
    server.desk.register_flat(server.pool)
    assert server.desk.prefix(["a"]) == 0
    assert server.desk.put_flat(["a", "b"], values) == [True, True]
    assert server.desk.prefix(["a", "b", "c"]) == 2
    targets = [torch.zeros(64) for _ in range(3)]
    assert server.desk.get_flat(["b", "c", "a"], targets) == [True, False, True]
    assert torch.equal(targets[0], values[1])
    assert torch.equal(targets[2], values[0])
    assert server.desk.put_flat([], []) == []


def test_nothing_raises_into_the_engine(server: Server) -> None:
    assert server.desk.get("nowhere", ["a"], server.pool.slots(0)) == [False]
    assert server.desk.put(KV, ["a", "b"], server.pool.slots(0)[:3]) == [False, False]
    assert server.desk.get_flat(["a"], [object()]) == [False]
    assert server.desk.put(KV, ["x" * 5000], server.pool.slots(0)) == [False]
    assert sum(server.complaints.counts.values()) == 4
    with pytest.raises(LayoutError, match="tells of no page buffers"):
        server.desk.register("odd", object(), torch.arange(8))


def test_what_is_cleared_is_gone_for_good(setup: PlugSetup) -> None:
    server = Server(setup)
    server.put(a=0)
    written(server.store)
    assert server.desk.clear()
    assert server.desk.prefix(["a"]) == 0
    server.desk.close()
    after = Server(setup)
    assert after.desk.prefix(["a"]) == 0
    after.desk.close()


def test_long_prompts_are_looked_up_in_parts_and_figures_are_bounded(server: Server) -> None:
    keys = [f"k{n}" for n in range(2 * LOOKUP_PAGES_MAX + 5)]
    slots = server.pool.slots(*[0] * len(keys))
    assert all(server.desk.put(KV, keys, slots))
    assert server.desk.prefix(keys) == len(keys)
    assert server.desk.prefix([*keys[: LOOKUP_PAGES_MAX + 1], "x", *keys]) == LOOKUP_PAGES_MAX + 1
    for _ in range(FIGURES_MAX + 1):
        server.desk.get(KV, ["x"], server.pool.slots(0))
    assert len(server.desk.take_moved("get")) == FIGURES_MAX
