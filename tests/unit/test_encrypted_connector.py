"""Encryption hides, authenticates, and forgets with its key."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError, ConnectorDataError, ConnectorRefusedError
from kvtier.interfaces import Listable
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors import decorators
from kvtier_connectors.decorators.encrypted import SEGMENT_BYTES, Encrypted
from kvtier_connectors.memory import MemoryConnector
from tests.lib.opened import Opened

LARGE = 2 * SEGMENT_BYTES + 1000
DATA = payload_of(b"key", LARGE)
HEADER_BYTES = 32
RECORD_BYTES = SEGMENT_BYTES + 28


class TenantKeys:
    """A key for each tenant, until it is taken away."""

    def __init__(self) -> None:
        self.held = {"a": b"a" * 32, "b": b"b" * 32}

    def key(self, tenant: str) -> bytes | None:
        return self.held.get(tenant)


@pytest.fixture
def store() -> MemoryConnector:
    return MemoryConnector()


@pytest.fixture
def keys() -> TenantKeys:
    return TenantKeys()


@pytest.fixture
def encrypted(store: MemoryConnector, keys: TenantKeys, opened: Opened) -> Encrypted:
    return opened(Encrypted(store, keys, "a"))


async def name_of(store: MemoryConnector, key: bytes) -> KeyInfo:
    """Return under which name an object lies, when it lies there for one encryption key alone."""
    (info,) = [info async for info in store.list(b"") if info.key.endswith(key)]
    return info


async def stored_bytes(store: MemoryConnector, key: bytes) -> bytearray:
    info = await name_of(store, key)
    (data,) = await get_whole(store, {info.key: info.nbytes})
    assert data is not None
    return bytearray(data)


async def put_there(store: MemoryConnector, key: bytes, data: bytes | bytearray) -> None:
    """Put other bytes in the place of an object."""
    await put(store, {(await name_of(store, key)).key: bytes(data)})


async def outcome_of(encrypted: Encrypted, key: bytes, nbytes: int) -> object:
    ((outcome, _),) = await get(encrypted, [ReadRequest(key, 0, nbytes)])
    return outcome


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, LARGE),
        (0, 4096),
        (SEGMENT_BYTES - 1, 2),
        (SEGMENT_BYTES, SEGMENT_BYTES),
        (5, 2 * SEGMENT_BYTES),
        (LARGE - 1, 1),
        (7, 0),
    ],
)
async def test_ranges_come_back(encrypted: Encrypted, offset: int, nbytes: int) -> None:
    await put(encrypted, {b"key": DATA})
    found = await get(encrypted, [ReadRequest(b"key", offset, nbytes)])
    assert found == [(nbytes, DATA[offset : offset + nbytes])]


@pytest.mark.parametrize(
    "nbytes", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, LARGE]
)
async def test_nothing_of_it_is_seen_and_sizes_are_known(
    store: MemoryConnector, encrypted: Encrypted, nbytes: int
) -> None:
    data = b"\xaa" * nbytes
    await put(encrypted, {b"key": data})
    stored = await stored_bytes(store, b"key")
    assert b"\xaa" * 16 not in stored
    assert len(stored) == HEADER_BYTES + nbytes + 28 * max(1, -(-nbytes // SEGMENT_BYTES))
    assert isinstance(encrypted, Listable)
    assert [info async for info in encrypted.list(b"")] == [KeyInfo(b"key", nbytes)]
    assert await get_whole(encrypted, {b"key": nbytes}) == [data]


async def test_two_writes_of_the_same_have_nothing_in_common(
    store: MemoryConnector, encrypted: Encrypted
) -> None:
    await put(encrypted, {b"k1": DATA, b"k2": DATA})
    first, second = await stored_bytes(store, b"k1"), await stored_bytes(store, b"k2")
    assert sum(a == b for a, b in zip(first, second, strict=True)) < len(first) / 100


@pytest.mark.parametrize(
    "position", [0, 4, 5, 8, 20, 31, 32, 43, 44, 1000, RECORD_BYTES + 31, LARGE]
)
async def test_b78_a_flipped_bit_anywhere_is_an_error(
    store: MemoryConnector, encrypted: Encrypted, position: int
) -> None:
    await put(encrypted, {b"key": DATA})
    stored = await stored_bytes(store, b"key")
    stored[position] ^= 1
    await put_there(store, b"key", stored)
    outcome = await outcome_of(encrypted, b"key", LARGE)
    if 5 <= position < 8:
        assert outcome == LARGE, "three bytes of the header mean nothing"
    else:
        assert isinstance(outcome, ConnectorDataError)


async def test_b78_swapped_cut_and_mixed_objects_are_errors(
    store: MemoryConnector, encrypted: Encrypted
) -> None:
    await put(encrypted, {b"k1": DATA, b"k2": DATA})
    first, second = await stored_bytes(store, b"k1"), await stored_bytes(store, b"k2")
    one, two = HEADER_BYTES + RECORD_BYTES, HEADER_BYTES + 2 * RECORD_BYTES
    spoilt = {
        "swapped": second,
        "cut": first[:-1],
        "cut at a segment": first[:two],
        "segments in another order": first[:HEADER_BYTES]
        + first[one:two]
        + first[HEADER_BYTES:one]
        + first[two:],
        "a segment of another object": first[:one] + second[one:],
        "no header": first[:10],
        "plain": bytearray(DATA),
    }
    for name, data in spoilt.items():
        await put_there(store, b"k1", data)
        assert isinstance(await outcome_of(encrypted, b"k1", LARGE), ConnectorDataError), name
    await put_there(store, b"k1", first)
    assert await outcome_of(encrypted, b"k1", LARGE) == LARGE


async def test_what_is_spoilt_is_not_read_again_and_again(
    store: MemoryConnector, keys: TenantKeys, opened: Opened
) -> None:
    timed = decorators.Timed(store)
    encrypted = opened(Encrypted(timed, keys, "a"))
    await put(encrypted, {b"key": DATA})
    stored = await stored_bytes(store, b"key")
    stored[-1] ^= 1
    await put_there(store, b"key", stored)
    assert isinstance(await outcome_of(encrypted, b"key", LARGE), ConnectorDataError)
    assert timed.reads.nbytes < 2 * len(stored)


async def test_another_tenants_object_is_an_error(
    store: MemoryConnector, keys: TenantKeys, encrypted: Encrypted, opened: Opened
) -> None:
    await put(encrypted, {b"key": DATA})
    elsewhere = MemoryConnector()
    other = opened(Encrypted(elsewhere, keys, "b"))
    await put(other, {b"key": DATA})
    await put_there(store, b"key", await stored_bytes(elsewhere, b"key"))
    assert isinstance(await outcome_of(encrypted, b"key", LARGE), ConnectorDataError)


async def test_those_with_different_keys_never_meet_in_one_store(
    store: MemoryConnector, keys: TenantKeys, encrypted: Encrypted, opened: Opened
) -> None:
    other = opened(Encrypted(store, keys, "b"))
    await put(encrypted, {b"key": DATA})
    assert await other.contains([b"key"]) == [False]
    assert await outcome_of(other, b"key", LARGE) is None
    await other.delete([b"key"])
    await put(other, {b"key": DATA[:500]})
    assert await get_whole(encrypted, {b"key": LARGE}) == [DATA]
    assert await get_whole(other, {b"key": 500}) == [DATA[:500]]
    for mine, nbytes in ((encrypted, LARGE), (other, 500)):
        assert isinstance(mine, Listable)
        assert [info async for info in mine.list(b"k")] == [KeyInfo(b"key", nbytes)]
    names = [info.key async for info in store.list(b"")]
    assert not any(key[:8] in name for name in names for key in keys.held.values())


async def test_a_lost_key_can_still_delete_what_it_wrote(
    store: MemoryConnector, keys: TenantKeys, encrypted: Encrypted
) -> None:
    await put(encrypted, {b"key": DATA})
    keys.held.clear()
    await encrypted.delete([b"key"])
    assert [info async for info in store.list(b"")] == []


async def test_without_any_key_nothing_is_listed_or_deleted(
    store: MemoryConnector, keys: TenantKeys, opened: Opened
) -> None:
    await put(store, {b"key": DATA})
    keys.held.clear()
    encrypted = opened(Encrypted(store, keys, "a"))
    await encrypted.delete([b"key"])
    assert isinstance(encrypted, Listable)
    assert [info async for info in encrypted.list(b"")] == []
    assert await store.contains([b"key"]) == [True]


async def test_a_tenants_kv_is_gone_with_its_key(keys: TenantKeys, encrypted: Encrypted) -> None:
    await put(encrypted, {b"key": DATA})
    key = keys.held.pop("a")
    assert await outcome_of(encrypted, b"key", LARGE) is None
    assert await encrypted.contains([b"key"]) == [False]
    (refused,) = await encrypted.write([WriteItem(b"key", memoryview(b"data"))])
    assert isinstance(refused, ConnectorRefusedError)
    keys.held["a"] = key
    assert await outcome_of(encrypted, b"key", LARGE) == LARGE


async def test_a_key_of_another_size_is_a_config_error(
    keys: TenantKeys, encrypted: Encrypted
) -> None:
    keys.held["a"] = b"short"
    with pytest.raises(ConfigError, match="32 bytes, not 5"):
        await encrypted.contains([b"key"])


async def test_an_object_replaced_between_the_turns_of_a_read_is_read_again(
    store: MemoryConnector, keys: TenantKeys, opened: Opened
) -> None:
    class Replacing(decorators.Decorator):
        """Puts a new object there after the header was read, a few times."""

        left = 2

        async def read(self, requests, into):  # type: ignore[no-untyped-def]
            outcomes = await super().read(requests, into)
            if self.left and requests[0].nbytes == HEADER_BYTES:
                self.left -= 1
                await put(writer, {b"key": payload_of(b"key", LARGE, self.left)})
            return outcomes

    writer = opened(Encrypted(store, keys, "a"))
    await put(writer, {b"key": DATA})
    reader = opened(Encrypted(Replacing(store), keys, "a"))
    assert await get_whole(reader, {b"key": LARGE}) == [payload_of(b"key", LARGE, 0)]


def test_it_is_found_beside_the_other_decorators() -> None:
    assert decorators.Encrypted is Encrypted
    with pytest.raises(AttributeError, match="no attribute 'Encripted'"):
        _ = decorators.Encripted
