"""L2 tasks over a cache: each has one result in time, and what is loaded is what was stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import MIB
from kvtier.testing.fault_files import EVER, FileFailure, FileGate, FileOperation
from kvtier_adapters.lmcache.desk import L2Desk, Named, Object, Signals
from kvtier_adapters.lmcache.limits import LAYOUTS_MAX, STORES_ACTIVE_MAX
from kvtier_adapters.payloads.complaints import Complaints
from tests.lib.keyed_setup import payload
from tests.lib.plug_setup import PlugSetup, plug_setup, written

WAIT_S = 20.0
NBYTES = 70_000
LAYOUT = "bfloat16[35000]"
READ = (FileOperation.READ,)
T = TypeVar("T")


class World:
    """A desk, with what it told and signalled."""

    def __init__(self, setup: PlugSetup, **options: Any) -> None:
        self.store = setup.store("lmcache", **options)
        self.held: dict[Any, int] = {}
        self.touched: list[Any] = []
        self._signals = {name: threading.Semaphore(0) for name in ("store", "lookup", "load")}
        signals = Signals(*(each.release for each in self._signals.values()))
        self.complaints = Complaints("test", SystemClock())
        self.desk = L2Desk(self.store, self, signals, self.complaints)

    def stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert not self.held.keys() & set(keys), "counted twice"
        self.held.update(zip(keys, sizes, strict=True))

    def accessed(self, keys: list[Any]) -> None:
        self.touched += keys

    def deleted(self, keys: list[Any], sizes: list[int]) -> None:
        for key, nbytes in zip(keys, sizes, strict=True):
            assert self.held.pop(key) == nbytes

    def wait(self, name: str, take: Callable[[], T | None]) -> T:
        assert self._signals[name].acquire(timeout=WAIT_S), f"no {name} ended"
        result = take()
        assert result is not None
        assert take() is None, "a result is taken once"
        return result

    def put(self, *names: str, layout: str = LAYOUT, nbytes: int = NBYTES) -> int:
        memory = [memoryview(payload(name.encode(), nbytes)) for name in names]
        task = self.desk.submit_store(objects(names, memory, layout))
        return self.wait("store", lambda: self.desk.take_stored().get(task))

    def get(self, *names: str, layout: str = LAYOUT, nbytes: int = NBYTES) -> list[bool]:
        into = [bytearray(nbytes) for _ in names]
        task = self.desk.submit_load(objects(names, map(memoryview, into), layout))
        filled = self.wait("load", lambda: self.desk.take_loaded(task))
        for name, data, there in zip(names, into, filled, strict=True):
            assert not there or data == payload(name.encode(), nbytes), f"{name}: wrong bytes"
        return filled

    def look_up(self, *names: str) -> list[bool]:
        task = self.desk.submit_lookup([named(name) for name in names])
        return self.wait("lookup", lambda: self.desk.take_looked_up(task))


def named(name: str) -> Named:
    return Named(name, name.encode())


def objects(names: Any, memory: Any, layout: str) -> list[Object]:
    return [
        Object(name, name.encode(), view, layout) for name, view in zip(names, memory, strict=True)
    ]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[PlugSetup]:
    with plug_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def world(setup: PlugSetup) -> Iterator[World]:
    world = World(setup)
    yield world
    setup.files.inject()
    world.desk.close()


def restarted(setup: PlugSetup, *names: str, **options: Any) -> World:
    """Store objects and begin anew: they lie on disk alone."""
    before = World(setup)
    assert before.put(*names) == NBYTES * len(names)
    written(before.store)
    before.desk.close()
    return World(setup, **options)


def test_what_is_stored_is_found_and_loaded(world: World) -> None:
    assert world.put("a", "b") == 2 * NBYTES
    assert world.look_up("a", "x", "b") == [True, False, True]
    assert world.get("x", "b", "a") == [False, True, True]
    assert world.held == {"a": NBYTES, "b": NBYTES}
    assert world.touched == ["b", "a"]
    assert world.put("a", "c") == 2 * NBYTES, "what is held already counts as stored"
    assert world.desk.figures == {"jobs": 0, "locked": 2, "keys": 3}
    assert world.desk.layouts == [LAYOUT]


def test_b41_after_a_restart_objects_are_found_and_counted_when_first_seen(
    setup: PlugSetup,
) -> None:
    world = restarted(setup, "a", "b")
    assert world.look_up("a", "b") == [True, True]
    assert world.held == {}
    assert world.get("a") == [True]
    assert world.held == {"a": NBYTES}
    world.desk.close()


def test_what_a_lookup_locked_is_not_deleted_until_it_is_unlocked(world: World) -> None:
    world.put("a", "b")
    assert world.look_up("a") == world.look_up("a") == [True]
    for locked in (2, 1):
        assert locked == 2 or world.desk.unlock(["a"]) is None  # type: ignore[func-returns-value]
        world.desk.delete([named("a"), named("b")])
        assert world.get("a", "b") == [True, False]
        assert world.held == {"a": NBYTES}
    world.desk.unlock(["a", "never locked"])
    world.desk.delete([named("a")])
    assert world.get("a") == [False]
    assert world.held == {}


def test_b27_objects_of_another_layout_are_a_miss_and_make_room(world: World) -> None:
    """Half precision and bfloat16 of one model have the same keys and sizes in LMCache."""
    world.put("a")
    assert world.get("a", layout="float16[35000]") == [False]
    assert world.complaints.counts == {"other_layout": 1}
    assert world.put("a", layout="float16[35000]") == NBYTES
    assert world.get("a", layout="float16[35000]") == [True]
    assert world.get("a", nbytes=NBYTES - 2) == [False], "of another size"
    for number in range(LAYOUTS_MAX + 1):
        world.put(f"k{number}", layout=f"uint8[{number}]", nbytes=number + 1)
    assert len(world.desk.layouts) == LAYOUTS_MAX


@pytest.mark.parametrize("how", ["flip", "cut", "swap", "gone"])
def test_b44_b78_corrupt_files_are_misses_and_are_written_again(setup: PlugSetup, how: str) -> None:
    names = ("a", "b", "c")
    world = restarted(setup, *names)
    for path in setup.shard_files():
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[len(data) // 2] ^= 1
        elif how == "cut":
            del data[len(data) // 2 :]
        elif how == "swap":
            data = bytearray(setup.shard_files()[0].read_bytes())
        path.unlink() if how == "gone" else path.write_bytes(data)
    filled = world.get(*names)
    assert filled.count(True) <= (1 if how == "swap" else 0)
    assert world.look_up(*names) == filled
    assert world.put(*names) == 3 * NBYTES, "none is poisoned for ever"
    assert world.get(*names) == [True] * 3
    world.desk.close()


def test_a_disk_that_hangs_is_a_miss_within_the_deadline(setup: PlugSetup) -> None:
    world = restarted(setup, "a", "b", load_deadline_s=0.2)
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    start = world.store.clock.now()
    assert world.get("a", "b") == [False, False]
    assert world.store.clock.now() - start < WAIT_S / 2
    assert world.put("new") == NBYTES, "stores go on"
    assert world.get("new") == [True]
    gate.open()
    world.desk.close()


def test_a_store_that_fails_says_so_and_the_next_one_works(setup: PlugSetup, world: World) -> None:
    too_large = MIB * 40
    assert world.put("huge", nbytes=too_large) == -1
    assert "huge" not in world.held
    setup.files.inject(FileFailure(operations=(FileOperation.CREATE,), errno=28, last=EVER))
    assert world.put("a") == NBYTES, "a full disk is no reason not to keep it in DRAM"
    assert world.get("a") == [True]


def test_tasks_that_cannot_be_read_have_a_result_all_the_same(world: World) -> None:
    task = world.desk.fail("store", 0)
    assert world.wait("store", lambda: world.desk.take_stored().get(task)) == -1
    task = world.desk.fail("lookup", 2)
    assert world.wait("lookup", lambda: world.desk.take_looked_up(task)) == [False, False]
    task = world.desk.fail("load", 3)
    assert world.wait("load", lambda: world.desk.take_loaded(task)) == [False] * 3


def test_close_gives_every_task_its_result(setup: PlugSetup) -> None:
    world = restarted(setup, "a")
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    into = bytearray(b"\xa5" * NBYTES)
    loads = [world.desk.submit_load(objects("a", [memoryview(into)], LAYOUT))]
    gate.wait_for_arrivals()
    data = payload(b"s", NBYTES)
    stores = [
        world.desk.submit_store(objects([f"s{n}"], [memoryview(data)], LAYOUT))
        for n in range(3 * STORES_ACTIVE_MAX)
    ]
    closing = threading.Thread(target=world.desk.close)
    closing.start()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert world.desk.take_loaded(loads[0]) in ([True], [False])
    assert world.desk.take_stored().keys() == set(stores)
    late = world.desk.submit_store(objects("z", [memoryview(data)], LAYOUT))
    assert world.desk.take_stored() == {late: -1}
