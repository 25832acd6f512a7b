"""What plugs with foreign keys share: options that mislead nobody, jobs that always end."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.config import Durability
from kvtier.constants import KEYED_BATCH_MAX, MIB
from kvtier.errors import ConfigError, LayoutError
from kvtier.testing.clock import FakeClock
from kvtier_adapters.payloads import runner as runner_module
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.limits import (
    COMPLAINT_INTERVAL_S,
    COPY_THREADS_MAX,
    DEADLINE_S_MAX,
    JOBS_ACTIVE_MAX,
    JOBS_MAX,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
)
from kvtier_adapters.payloads.memory import memory_at
from kvtier_adapters.payloads.options import PlugOptions, plug_options
from kvtier_adapters.payloads.runner import Job, Runner
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.payloads.work import Steps, lookup_steps, run_to_end, side_by_side

WAIT_S = 20.0


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner("test-runner", Complaints("test", SystemClock()))
    yield runner
    runner.close()


class Ended:
    """Notes what came of jobs, in order."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._came = threading.Condition()

    def __call__(self, value: Any) -> None:
        with self._came:
            self.values.append(value)
            self._came.notify_all()

    def wait(self, count: int) -> list[Any]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.values) >= count, WAIT_S), self.values
            return list(self.values)


def counted(steps: int, value: object) -> Steps[object]:
    for _ in range(steps):
        yield
    return value


def until(event: threading.Event, value: object = None) -> Steps[object]:
    while not event.is_set():
        yield
    return value


def broken() -> Steps[object]:
    yield
    raise RuntimeError("it broke")


# Options


def test_options_are_read_from_a_table_as_engines_have_them(tmp_path: Path) -> None:
    table = {
        "dram": "16MiB",
        "disk": str(tmp_path),
        "disk_bytes": "1GiB",
        "disk_codec": "zstd",
        "durability": "batch",
        "remote": ["memory://"],
        "weights_id": "model@1",
        "load_deadline_s": 2,
    }
    options = plug_options(table, "kvtier")
    config = options.cache_config()
    assert (config.dram_bytes, config.slab_bytes, options.load_deadline_s) == (
        16 * MIB,
        16 * MIB,
        2,
    )
    assert config.disk is not None
    assert (config.disk.capacity_bytes, config.disk.durability) == (1024 * MIB, Durability.BATCH)
    assert (config.disk.byte_codec, config.disk.codec) == ("zstd", None)
    assert [remote.url for remote in config.remotes] == ["memory://"]
    assert plug_options(None, "kvtier") == PlugOptions()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"drams": "1GiB"}, r"kvtier has no 'drams' .did you mean 'dram'"),
        ({"dram": "1GB"}, "kvtier.dram: not a size"),
        ({"disk": "kv"}, "weights_id is missing"),
        ({"remote": "memory://"}, "weights_id is missing"),
        ({"disk": {"path": "kv"}, "weights_id": "w"}, "disk = .*: allowed is a list"),
        ({"durability": "eech"}, "durability = 'eech': allowed is none, batch, each .did you mean"),
        ({"load_deadline_s": 0}, "load_deadline_s = 0.0: allowed is more than 0"),
        ({"store_deadline_s": DEADLINE_S_MAX + 1}, "store_deadline_s = 61.0: allowed is"),
        ({"lookup_deadline_s": float("nan")}, "lookup_deadline_s = nan"),
        ({"copy_threads": COPY_THREADS_MAX + 1}, "copy_threads = 17: allowed is 1 .. 16"),
        ([1], r"kvtier = \[1\]: allowed is a table"),
    ],
)
def test_options_that_cannot_be_say_which_and_what_is_allowed(table: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plug_options(table, "kvtier")


def test_each_rank_has_a_folder_of_its_own(tmp_path: Path) -> None:
    table = {"disk": [f"{tmp_path}/a/", f"{tmp_path}/b"], "weights_id": "w"}
    config = plug_options(table, "kvtier").cache_config("rank-1")
    assert config.disk is not None
    assert config.disk.paths == (f"{tmp_path}/a/rank-1", f"{tmp_path}/b/rank-1")
    assert PlugOptions().cache_config("rank-1").disk is None


# Jobs


def test_a_runner_that_is_woken_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PAUSE_S_MIN", WAIT_S)
    runner = Runner("test-runner", Complaints("test", SystemClock()))
    stepped, go, ended = threading.Event(), threading.Event(), Ended()

    def noted() -> Steps[object]:
        while not go.is_set():
            stepped.set()
            yield
        return "woken"

    runner.wake()  # Nobody works: nothing happens.
    runner.submit(Job(noted(), ended))
    assert stepped.wait(WAIT_S)
    go.set()
    began_s = SystemClock().now()
    runner.wake()
    assert ended.wait(1) == ["woken"]
    assert SystemClock().now() - began_s < WAIT_S / 2
    runner.close()


def test_jobs_end_with_what_they_return(runner: Runner) -> None:
    ended = Ended()
    for number in range(100):
        runner.submit(Job(counted(number % 3, number), ended))
    assert sorted(ended.wait(100)) == list(range(100))
    assert runner.drain(WAIT_S)
    assert runner.jobs == 0


def test_a_job_that_raises_ends_as_lost_and_the_others_go_on(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    ended = Ended()

    def bad_end(_: Any) -> None:
        raise RuntimeError("its end broke")

    with caplog.at_level(logging.WARNING, "kvtier.adapters"):
        runner.submit(Job(broken(), ended))
        runner.submit(Job(counted(0, None), bad_end))
        runner.submit(Job(counted(3, "fine"), ended))
        assert ended.wait(2) == [None, "fine"]
        assert runner.drain(WAIT_S)
    assert "a job raised RuntimeError: it broke" in caplog.text
    assert "its end broke" in caplog.text


def test_jobs_are_bounded_and_one_too_many_ends_at_once(runner: Runner) -> None:
    """The bound counts those that wait and those that run; `JOBS_ACTIVE_MAX` run at a time."""
    go, ended, begun = threading.Event(), Ended(), []

    def noted(number: int) -> Steps[object]:
        begun.append(number)
        return (yield from until(go, number))

    for number in range(JOBS_MAX):
        runner.submit(Job(noted(number), ended))
    refused = Ended()
    runner.submit(Job(noted(-1), refused))
    assert refused.values == [None], "it is told by whoever submits"
    assert len(begun) <= JOBS_ACTIVE_MAX
    assert not runner.drain(0)
    go.set()
    assert sorted(ended.wait(JOBS_MAX)) == list(range(JOBS_MAX))
    assert begun == list(range(JOBS_MAX)), "in the order they came"
    assert 0 < PAUSE_S_MIN < PAUSE_S_MAX


def test_close_waits_for_jobs_and_takes_no_more() -> None:
    runner = Runner("test-runner", Complaints("test", SystemClock()))
    go, ended = threading.Event(), Ended()
    runner.submit(Job(until(go, "done"), ended))
    closing = threading.Thread(target=runner.close)
    closing.start()
    go.set()
    closing.join(WAIT_S)
    assert ended.values == ["done"]
    runner.submit(Job(counted(0, "late"), ended))
    assert ended.values == ["done", None]


def test_complaints_are_told_once_a_minute_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    complaints = Complaints("plug", clock)
    with caplog.at_level(logging.WARNING, "kvtier.adapters"):
        for _ in range(3):
            complaints.tell("miss", "it went wrong")
        clock.advance(COMPLAINT_INTERVAL_S)
        complaints.tell("miss", "it went wrong")
        complaints.tell("other", "and so")
    assert complaints.counts == {"miss": 4, "other": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "plug: it went wrong (1 of this kind so far)",
        "plug: it went wrong (4 of this kind so far)",
        "plug: and so (1 of this kind so far)",
    ]


# Payloads


@pytest.fixture
def store() -> Iterator[PlugStore]:
    options = PlugOptions(dram_bytes=64 * MIB, load_deadline_s=DEADLINE_S_MAX)
    store = PlugStore(options, "test 1")
    yield store
    store.close()


def test_batches_larger_than_a_call_may_be_are_cut(store: PlugStore) -> None:
    face = store.face("small")
    count = KEYED_BATCH_MAX + 3
    keys = [b"%d" % number for number in range(count)]
    # All but a few say something else: only the count matters here, not the bytes.
    assert store.run(face.lookup(keys)) == [False] * count
    some = keys[:5] + keys[-5:]
    assert all(store.run(face.put([(key, key * 3) for key in some])))
    held = store.run(face.lookup(keys))
    assert [key for key, there in zip(keys, held, strict=True) if there] == some
    assert store.run(face.prefix(keys, at_once=2)) == 5
    assert store.run(face.prefix(keys[:4], at_once=3)) == 4
    into = [bytearray(len(key) * 3) for key in keys]
    assert store.run(face.get(keys, into)) == held
    assert into[-1] == keys[-1] * 3


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_a_batch_is_shared_out_among_threads_and_stays_in_order(threads: int) -> None:
    options = PlugOptions(dram_bytes=8 * MIB, copy_threads=threads)
    store = PlugStore(options, "test 1")
    face = store.face("kind")
    for count in (0, 1, 2, 7, 40):
        keys = [b"%d" % number for number in range(count)]
        assert store.run(face.put([(key, key) for key in keys])) == [True] * count
        wanted = [key for key in keys for _ in range(2)]
        wanted[::2] = [b"x" * len(key) for key in wanted[::2]]
        into = [bytearray(len(key)) for key in wanted]
        assert store.run(face.get(wanted, into)) == [False, True] * count
        assert into[1::2] == keys
        face.delete(keys)
        assert not any(store.run(face.lookup(keys)))
        assert not any(store.run(face.get(keys, into[1::2])))
    store.close()


def test_when_one_share_raises_the_others_end_before_it_is_raised() -> None:
    done = []

    def share(steps: int) -> Steps[list[int]]:
        for _ in range(steps):
            yield
        done.append(steps)
        if steps == 1:
            raise LayoutError("it cannot be")
        return [steps]

    with pytest.raises(LayoutError, match="it cannot be"):
        run_to_end(side_by_side([share(3), share(1), share(5)]), threading.Event())
    assert sorted(done) == [1, 3, 5]


def test_kinds_of_payload_never_meet(store: PlugStore) -> None:
    one, other = store.face("page=64"), store.face("page=32")
    assert store.face("page=64") is one
    assert store.run(one.put([(b"key", b"64")])) == [True]
    assert store.run(other.get([b"key"], [bytearray(2)])) == [False]
    store.forget_all()
    assert store.run(one.lookup([b"key"])) == [False]


def test_what_nobody_can_say_by_the_deadline_is_not_held(store: PlugStore) -> None:
    clock = FakeClock()

    class Unsure:
        """Knows one key, and of the others nothing yet."""

        def contains(self, keys: list[bytes]) -> list[bool | None]:
            return [True if key == b"known" else None for key in keys]

    deadline = clock.now() + 1.0
    steps = lookup_steps(Unsure(), [b"a", b"known"], clock, deadline)  # type: ignore[arg-type]
    next(steps)
    next(steps)
    clock.advance(1.0)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == [False, True]


def test_after_cancel_everything_comes_to_nothing_soon(store: PlugStore) -> None:
    face = store.face("kind")
    assert store.run(face.put([(b"key", b"data")])) == [True]
    store.cancel()
    assert store.run(face.get([b"key"], [bytearray(4)])) == [False]
    assert store.run(face.put([(b"other", b"data")])) == [False]


def test_memory_is_seen_where_it_lies() -> None:
    memory = ctypes.create_string_buffer(b"kv bytes", 8)
    view = memory_at(ctypes.addressof(memory), 8)
    assert bytes(view) == b"kv bytes"
    view[:2] = b"KV"
    assert memory.raw == b"KV bytes"
    assert not view.readonly
