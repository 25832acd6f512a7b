"""Epochs over a remote: what one host invalidates, no other host serves for long, or ever again."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache.below import remote_epochs as module
from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.cache.cache import Cache
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig, RemoteConfig
from kvtier.constants import (
    BREAKER_FAILURES_MAX,
    EPOCHS_READ_S,
    EPOCHS_RETRY_S,
    EPOCHS_WAIT_S_MAX,
)
from kvtier.errors import (
    ConnectorUnavailableError,
    TierUnavailableError,
)
from kvtier.keys import namespace_digest
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.epoch_record import decode_epochs, encode_epochs
from kvtier.types import MissReason, Namespace, Tier
from tests.lib.cache_setup import LAYOUT, NAMESPACE, begun, settle, tier_stats
from tests.lib.epoch_hosts import (
    FIVE,
    away,
    copies,
    found,
    in_time,
    known,
    reads_on,
    state,
    stored,
    told,
)
from tests.lib.remote_lab import (
    RemoteLab,
    remote_counters,
    remote_lab,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


# Two hosts, one remote


def test_b11_another_host_stops_within_the_interval_and_never_serves_again(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours, theirs = lab.open(), lab.open(clock=clock)
    stored(ours)
    assert theirs.load(theirs.match(theirs.sequence(FIVE))).outcome.end_token == len(FIVE)
    assert ours.cache.invalidate(NAMESPACE) == 1
    assert found(ours) == 0
    clock.advance(EPOCHS_READ_S)
    wait_until(lambda: found(theirs) == 0, "another host goes on serving")
    assert theirs.store(theirs.sequence(FIVE)), "it begins anew"
    assert found(theirs) == len(FIVE)
    assert ours.cache.root(NAMESPACE) == theirs.cache.root(NAMESPACE), "both are of one epoch"


def test_b11_a_tenant_that_one_host_ends_is_ended_on_all(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours, theirs = lab.open(salt="a9f1"), lab.open(salt="a9f1", clock=clock)
    stored(ours)
    assert found(theirs) == len(FIVE)
    ours.cache.tenants.delete("a9f1")
    in_time(clock, lambda: found(theirs) == 0, "another host goes on serving")


def test_it_is_read_in_the_interval_and_not_between(lab: RemoteLab) -> None:
    clock = FakeClock()
    lab.open(clock=clock)
    first = lab.remote.calls["epochs"]
    assert first == 2, "both copies, at the start"
    clock.advance(EPOCHS_READ_S - 0.01)
    engine = lab.open()  # Its start takes as long as some ticks of the other.
    lab.close(engine)
    assert lab.remote.calls["epochs"] == 2 * first
    reads_on(lab, clock, 0.01)
    assert copies(lab) == [None, None], "where nothing was raised nothing is written"


def test_b11_a_load_under_way_on_another_host_comes_to_nothing(lab: RemoteLab) -> None:
    clock = FakeClock()
    stored(lab.open())
    theirs = lab.open(clock=clock)
    lab.remote.hold("read")
    loading = begun(theirs, FIVE)
    loading.load.poll()
    lab.engines[0].cache.invalidate(NAMESPACE)
    clock.advance(EPOCHS_READ_S)  # Once: the load has a deadline too.
    wait_until(lambda: loading.load.outcome is not None, "it goes on")
    lab.remote.release()
    assert theirs.drive(loading).end_token == 0
    settle(theirs)


def test_b11_a_host_with_an_empty_disk_begins_where_the_others_are(lab: RemoteLab) -> None:
    ours = lab.open()
    stored(ours)
    lab.remote.hold("delete")
    ours.cache.invalidate(NAMESPACE)
    fresh = lab.open(disk_chunks=16)
    assert found(fresh) == 0
    assert len(lab.remote.objects()) == 5, "although it is all there still"
    assert fresh.cache.invalidate(NAMESPACE) == 2


def test_b11_what_a_disk_alone_knew_is_told_to_the_remote(lab: RemoteLab) -> None:
    """The remote is new, or was emptied."""
    ours = lab.open(disk_chunks=16)
    ours.match(ours.sequence([]))
    ours.cache.invalidate(NAMESPACE)
    lab.close(ours)
    for key in EPOCH_KEYS:
        lab.remote.drop(key)
    clock = FakeClock()
    ours = lab.open(disk_chunks=16, clock=clock)
    ours.match(ours.sequence([]))
    in_time(clock, lambda: None not in copies(lab), "it is not told")
    assert told(lab) >= 1


def test_b11_a_store_that_lost_them_is_told_again(lab: RemoteLab) -> None:
    clock = FakeClock()
    ours = lab.open(clock=clock)
    ours.cache.invalidate(NAMESPACE)
    lab.remote.drop(EPOCH_KEYS[0])
    in_time(clock, lambda: None not in copies(lab), "one copy is not written again")
    for key in EPOCH_KEYS:
        lab.remote.drop(key)
    in_time(clock, lambda: None not in copies(lab), "they are not written again")
    assert told(lab) == ours.cache.invalidate(NAMESPACE) - 1 == 1


# Races


def test_b11_hosts_that_raise_at_once_lose_nothing(lab: RemoteLab) -> None:
    clock = FakeClock()
    engines = [lab.open(clock=clock) for _ in range(3)]
    others = [Namespace(f"weights {n}", LAYOUT) for n in range(len(engines))]

    def raise_all(engine: EngineDouble, own: Namespace) -> None:
        for namespace in (own, NAMESPACE, own):
            engine.cache.invalidate(namespace)

    pairs = zip(engines, others, strict=True)
    threads = [threading.Thread(target=raise_all, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def agree() -> bool:
        clock.advance(EPOCHS_READ_S)
        return all(
            len({engine.cache.root(namespace) for engine in engines}) == 1
            for namespace in (NAMESPACE, *others)
        )

    wait_until(agree, "they do not agree")
    for namespace in others:
        first, _ = copies(lab)
        assert first is not None
        assert decode_epochs(first).epochs[namespace_digest(namespace)] >= 2


def test_b11_a_host_that_overwrites_a_raise_is_made_up_for_by_the_next_round(
    lab: RemoteLab,
) -> None:
    clock = FakeClock()
    ours = lab.open(clock=clock)
    ours.cache.invalidate(NAMESPACE)
    lab.remote.put_epochs(encode_epochs({b"x" * 32: 7}, 0))
    in_time(clock, lambda: told(lab) >= 1, "it stays lost")
    first, _ = copies(lab)
    assert first is not None
    assert decode_epochs(first).epochs[b"x" * 32] == 7, "and theirs is kept"


def test_b11_what_was_raised_twice_unknown_to_each_other_is_new_for_both(lab: RemoteLab) -> None:
    """Each host's first raise, one while it could not reach the remote: not the same epoch."""
    clock = FakeClock()
    ours, theirs = lab.open(clock=clock, deadline_s=0.2), lab.open()
    away(lab)
    with pytest.raises(TierUnavailableError):
        ours.cache.invalidate(NAMESPACE)
    lab.remote.twist.clear()
    theirs.cache.invalidate(NAMESPACE)
    stored(theirs)
    assert found(ours) == 0, "while it has not read anew it asks for nothing"
    in_time(clock, lambda: told(lab) == 2, "what was raised later is not above")
    known(ours)
    assert found(ours) == 0


def test_b11_until_it_is_read_after_a_raise_the_remote_is_asked_for_nothing(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there may be of the number that was reached here, and older than the raise."""
    monkeypatch.setattr(module, "EPOCHS_TELL_S_MAX", 0.1)
    ours, theirs = lab.open(clock=FakeClock(), deadline_s=60.0), lab.open()
    theirs.cache.invalidate(NAMESPACE)
    stored(theirs)
    lab.remote.hold("epochs")
    with pytest.raises(TierUnavailableError):
        ours.cache.invalidate(NAMESPACE)
    assert ours.cache.root(NAMESPACE) == theirs.cache.root(NAMESPACE)
    assert found(ours) == 0
    lab.remote.release()
    wait_until(lambda: told(lab) == 2, "it does not end above")


def test_b11_so_it_is_after_a_restart_that_came_between(lab: RemoteLab) -> None:
    """The disk knows what the remote was not told; another host has reached that number since."""
    ours, theirs = lab.open(disk_chunks=16, deadline_s=0.2), lab.open()
    ours.match(ours.sequence([]))
    away(lab)
    with pytest.raises(TierUnavailableError, match="remote 0 has not been told"):
        ours.cache.invalidate(NAMESPACE)
    lab.close(ours)
    lab.remote.twist.clear()
    assert theirs.cache.invalidate(NAMESPACE) == 1
    stored(theirs)
    clock = FakeClock()
    ours = lab.open(disk_chunks=16, clock=clock)
    ours.match(ours.sequence([]))
    in_time(clock, lambda: told(lab) == 2, "another host's is taken for what was raised here")
    assert found(ours) == 0


# The start


def test_b11_nothing_of_a_remote_is_served_before_its_epochs_are_known(lab: RemoteLab) -> None:
    stored(lab.open())
    lab.remote.hold("epochs")
    before = SystemClock().now()
    fresh = lab.open(deadline_s=60.0)
    assert SystemClock().now() - before < 5 * EPOCHS_WAIT_S_MAX
    asked = lab.remote.calls["contains"]
    match = fresh.match(fresh.sequence(FIVE))
    assert match.tokens == 0
    fresh.cache.note_admission(match, 0, len(FIVE))
    assert remote_counters(fresh).miss_tokens == {MissReason.UNAVAILABLE: len(FIVE)}
    assert lab.remote.calls["contains"] == asked
    assert state(fresh) == "opening"
    lab.remote.release()
    wait_until(lambda: found(fresh) == len(FIVE), "it is not used when they are")


def test_a_read_that_fails_once_is_tried_soon(lab: RemoteLab) -> None:
    clock = FakeClock()
    stored(lab.open())
    away(lab)
    fresh = lab.open(clock=clock)
    assert found(fresh) == 0
    lab.remote.twist.clear()
    in_time(clock, lambda: found(fresh) == len(FIVE), "it is not tried again")


def test_b11_while_they_cannot_be_read_again_nothing_of_the_remote_is_served(
    lab: RemoteLab,
) -> None:
    clock = FakeClock()
    stored(lab.open())
    theirs = lab.open(clock=clock)
    assert found(theirs) == len(FIVE)

    def fail(_: Any) -> Any:
        raise ConnectorUnavailableError("these alone cannot be read")

    lab.remote.twist["epochs"] = fail
    clock.advance(EPOCHS_READ_S)  # Once: it does not take a breaker.
    wait_until(lambda: found(theirs) == 0, "another host may have raised them")

    def broken() -> bool:
        clock.advance(EPOCHS_RETRY_S)
        return tier_stats(theirs.cache, Tier.REMOTE).state == "failing"

    assert BREAKER_FAILURES_MAX > 1
    wait_until(broken, "it fails and no state says so")
    lab.remote.twist.clear()
    in_time(clock, lambda: found(theirs) == len(FIVE), "it is not used again")


# A real folder


KILLED = """
import asyncio, pickle, sys, threading
from pathlib import Path
from kvtier import Cache, CacheConfig, DiskConfig, RemoteConfig
from kvtier.clock import SystemClock
from kvtier_connectors.memory import MemoryConnector

class Hanging(MemoryConnector):
    hangs = threading.Event()
    hung = threading.Event()

    async def read(self, requests, into):
        if self.hangs.is_set():
            self.hung.set()
            await asyncio.sleep(600.0)
        return await super().read(requests, into)

folder, namespace = Path(sys.argv[1]) / "disk", pickle.loads(bytes.fromhex(sys.argv[2]))
remote = RemoteConfig("memory://", deadline_s=600.0)
disk = DiskConfig(str(folder), 1 << 20)
config = CacheConfig(1 << 20, disk, remotes=(remote,), slab_bytes=4096)
cache = Cache(config, connect=lambda _: Hanging())
while cache.stats().degraded:
    SystemClock().sleep(0.01)
Hanging.hangs.set()
threading.Thread(target=cache.invalidate, args=(namespace,), daemon=True).start()
while not (folder / "epochs").exists():
    SystemClock().sleep(0.01)
Hanging.hung.wait()
print("kept", flush=True)
sys.stdin.read()
"""


def test_b11_kill_9_between_disk_and_remote_loses_nothing(lab: RemoteLab) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(lab.folder), pickle.dumps(NAMESPACE).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"kept\n"
        process.send_signal(signal.SIGKILL)
    theirs = lab.open()
    stored(theirs)
    clock = FakeClock()
    ours = lab.open(disk_chunks=16, clock=clock)
    ours.match(ours.sequence([]))
    in_time(clock, lambda: None not in copies(lab), "the remote is not told after the restart")
    assert found(ours) == 0
    assert found(lab.open()) == 0


@pytest.mark.parametrize("medium", ["file", "memory"])
def test_b11_over_a_real_connector(tmp_path: Path, medium: str) -> None:
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared" if medium == "file" else f"memory://{tmp_path.name}"

    def opened(clock: FakeClock | None = None) -> EngineDouble:
        config = CacheConfig(1 << 20, remotes=(RemoteConfig(url),), slab_bytes=4096)
        return EngineDouble(Cache(config, clock=clock), NAMESPACE, block_tokens=4, clock=clock)

    clock = FakeClock()
    engines = [opened(), opened(clock)]
    ours, theirs = engines
    stored(ours)
    assert theirs.load(theirs.match(theirs.sequence(FIVE))).outcome.end_token == len(FIVE)
    ours.cache.invalidate(NAMESPACE)
    in_time(clock, lambda: found(theirs) == 0, "another host goes on serving")
    engines.append(opened())
    assert found(engines[-1]) == 0
    for engine in engines:
        engine.close()
        engine.cache.close()
