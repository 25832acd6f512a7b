"""Foreign keys over a remote: found, brought up, deleted there; lies and silence are misses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.keyed import KeyedCache
from kvtier.constants import MIB
from kvtier.errors import ConnectorUnavailableError
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason, Tier
from tests.lib.keyed_setup import (
    NAMESPACE,
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    payload,
    put,
    settle,
    written,
)
from tests.lib.remote_lab import ToyRemote

SIZES = {b"a": 3 * MIB + 5, b"b": 70_000, b"c": 1}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def known(keyed: KeyedCache, keys: list[bytes]) -> list[bool]:
    """Ask until the remote has answered."""
    answers: list[bool | None] = []

    def answered() -> bool:
        answers[:] = keyed.contains(keys)
        return None not in answers

    wait_until(answered, "the remote does not answer")
    return [answer is True for answer in answers]


def test_payloads_come_back_from_a_remote(setup: KeyedSetup) -> None:
    keyed, cache = setup.in_remote(SIZES)
    assert known(keyed, [*SIZES, b"other"]) == [True, True, True, False]
    assert get(keyed, SIZES) == [Tier.REMOTE] * 3
    settle(cache)
    assert get(keyed, SIZES) == [Tier.DRAM] * 3


def test_what_a_remote_lacks_is_absent(setup: KeyedSetup) -> None:
    keyed, _ = setup.in_remote({b"a": 100})
    assert get(keyed, {b"a": 100, b"b": 100}) == [Tier.REMOTE, MissReason.ABSENT]


def test_a_payload_of_another_size_is_absent_and_stays(setup: KeyedSetup) -> None:
    keyed, _ = setup.in_remote(SIZES)
    for wrong in (1, 4096, 80_000, 2 * MIB, 100 * MIB):
        assert get(keyed, {b"b": wrong}) in ([MissReason.ABSENT], [MissReason.NO_ROOM])
    assert get(keyed, {b"b": 70_000}) == [Tier.REMOTE]


@pytest.mark.parametrize("at", [40, 5000, -4096])
def test_b78_what_a_remote_spoils_is_a_miss(setup: KeyedSetup, at: int) -> None:
    keyed, cache = setup.in_remote({b"b": 70_000})
    remote = setup.remote
    assert remote is not None
    ((key, data),) = remote.objects().items()
    spoiled = bytearray(data)
    spoiled[at] ^= 1
    remote.put(key, bytes(spoiled))
    assert get(keyed, {b"b": 70_000}) == [MissReason.CORRUPT]
    put(keyed, {b"b": 70_000})
    assert get(keyed, {b"b": 70_000}) == [Tier.DRAM]
    written(cache)


def test_a_remote_that_is_silent_costs_the_deadline(setup: KeyedSetup) -> None:
    keyed, cache = setup.in_remote(SIZES)
    assert known(keyed, list(SIZES)) == [True] * 3
    remote = setup.remote
    assert remote is not None
    remote.hold("read")
    into = [bytearray(nbytes) for nbytes in SIZES.values()]
    transfer = keyed.get(list(SIZES), into)
    remote.wait_for_calls("read", 1)
    transfer.cancel()
    assert finished(transfer) == [MissReason.CANCELLED] * 3
    remote.release()
    settle(cache)
    assert not any(any(buffer) for buffer in into)


def test_a_remote_that_is_away_is_a_miss(setup: KeyedSetup) -> None:
    setup.remote = ToyRemote()

    def away(_: object) -> object:
        raise ConnectorUnavailableError("away")

    setup.remote.twist = dict.fromkeys(("contains", "read", "write"), away)
    keyed, _ = setup.open(disk_bytes=None)
    assert get(keyed, {b"k": 100}) == [MissReason.ABSENT]
    assert put(keyed, {b"k": 100}) == [Tier.DRAM]
    assert get(keyed, {b"k": 100}) == [Tier.DRAM]


def test_what_is_deleted_while_it_is_uploaded_does_not_come_back(setup: KeyedSetup) -> None:
    setup.remote = remote = ToyRemote()
    keyed, cache = setup.open(disk_bytes=None)
    remote.hold("write")
    put(keyed, {b"k": 5000})
    remote.wait_for_calls("write", 1)
    keyed.delete([b"k"])
    assert keyed.contains([b"k"]) == [False]
    remote.release()
    written(cache)
    assert known(keyed, [b"k"]) == [False]
    wait_until(lambda: not remote.objects(), "it stays in the remote")
    assert put(keyed, {b"k": 5000}, 1) == [Tier.DRAM]
    written(cache)
    setup.close(keyed)
    keyed, _ = setup.open(disk_bytes=None)
    assert get(keyed, {b"k": 5000}, 1) in ([Tier.REMOTE], [MissReason.ABSENT])


def test_an_engines_kv_beside_payloads_in_one_namespace(setup: KeyedSetup) -> None:
    """What a payload is packed as says nothing of the namespace's KV."""
    keyed, cache = setup.in_remote({b"k": 5000})
    assert get(keyed, {b"k": 5000}) == [Tier.REMOTE]
    engine = EngineDouble(cache, NAMESPACE, block_tokens=16)
    tokens = range(256 * 2)
    engine.store(engine.sequence(tokens))
    written(cache)
    engine.close()
    setup.close(keyed)
    keyed, cache = setup.open(disk_bytes=None)
    assert get(keyed, {b"k": 5000}) == [Tier.REMOTE]
    engine = EngineDouble(cache, NAMESPACE, block_tokens=16)
    match = engine.match(engine.sequence(tokens))
    assert engine.load(match).outcome.tokens_by_tier == {Tier.REMOTE: 512}
    engine.close()


def test_bytes_of_a_put_are_those_of_that_moment(setup: KeyedSetup) -> None:
    """The caller's buffer is its own again once the outcome is known, whatever is written later."""
    setup.remote = remote = ToyRemote()
    keyed, cache = setup.open(disk_bytes=None)
    remote.hold("write")
    data = bytearray(payload(b"k", 5000))
    assert finished(keyed.put([(b"k", data)])) == [Tier.DRAM]
    data[:] = bytes(5000)
    remote.release()
    written(cache)
    setup.close(keyed)
    keyed, _ = setup.open(disk_bytes=None)
    assert get(keyed, {b"k": 5000}) == [Tier.REMOTE]
