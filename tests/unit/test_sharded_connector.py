"""Rendezvous hashing: even, the same for everybody, and little moves."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.errors import ConfigError, ConnectorUnavailableError
from kvtier.interfaces import Listable
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.testing.faults import FailCall, Faulty, Operation
from kvtier.types import ReadRequest
from kvtier_connectors.decorators import Sharded
from kvtier_connectors.memory import MemoryConnector

KEYS = [b"key%d" % number for number in range(3000)]


def sharded(*names: str) -> Sharded:
    return Sharded({name: MemoryConnector() for name in names})


def test_keys_are_spread_evenly() -> None:
    counts = Counter(map(sharded("a", "b", "c").owner_of, KEYS))
    assert all(900 < counts[name] < 1100 for name in "abc")


def test_the_order_of_the_names_does_not_matter() -> None:
    first, second = sharded("a", "b", "c"), sharded("c", "a", "b")
    assert [first.owner_of(key) for key in KEYS] == [second.owner_of(key) for key in KEYS]


def test_only_the_keys_of_a_name_that_goes_move() -> None:
    before, after = sharded("a", "b", "c"), sharded("a", "b")
    for key in KEYS:
        owner = before.owner_of(key)
        assert owner == "c" or after.owner_of(key) == owner


async def test_one_that_fails_costs_its_own_keys_only() -> None:
    stores = {name: Faulty(MemoryConnector()) for name in "abc"}
    connector = Sharded(stores)
    objects = {key: payload_of(key, 10) for key in KEYS[:60]}
    await put(connector, objects)
    stores["b"].faults = [FailCall(operation, 1, last=0) for operation in Operation]
    found = await get(connector, [ReadRequest(key, 0, 10) for key in objects])
    there = await connector.contains(list(objects))
    for (key, data), (outcome, placed), is_there in zip(objects.items(), found, there, strict=True):
        if connector.owner_of(key) == "b":
            assert isinstance(outcome, ConnectorUnavailableError)
        else:
            assert placed == data
        assert is_there == (connector.owner_of(key) != "b")


async def test_it_lists_what_can_be_read_if_all_can_list() -> None:
    stores = {name: MemoryConnector() for name in "abc"}
    connector = Sharded(stores)
    assert isinstance(connector, Listable)
    await put(connector, dict.fromkeys(KEYS[:30], b"x"))
    wrong = next(name for name in "abc" if name != connector.owner_of(b"key999"))
    await put(stores[wrong], {b"key999": b"misplaced"})
    assert sorted([info.key async for info in connector.list(b"")]) == sorted(KEYS[:30])
    assert not isinstance(Sharded({**stores, "d": Faulty(MemoryConnector())}), Listable)


async def test_batches_over_all_of_them_keep_their_order() -> None:
    connector = sharded("a", "b", "c")
    objects = {key: payload_of(key, 20) for key in KEYS[:50]}
    await put(connector, objects)
    assert await get_whole(connector, dict.fromkeys(objects, 20)) == list(objects.values())
    await connector.delete(list(objects)[::2])
    assert await connector.contains(list(objects)) == [False, True] * 25


def test_nothing_to_shard_over_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nothing"):
        Sharded({})
