"""What every connector must do. Subclass in a test module and supply ``make_connector``::

    class TestMyConnector(ConnectorContract):
        def make_connector(self) -> Connector:
            return MyConnector(...)

Tests are coroutines and need pytest-asyncio in its auto mode.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import pytest

from kvtier.interfaces import Connector, Listable, ReadOutcome
from kvtier.types import ReadRequest, WriteItem

SIZES: Final = (0, 1, 511, 512, 513, 4095, 4096, 65_537)
WRITERS: Final = 8
ROUNDS: Final = 20


def payload_of(key: bytes, nbytes: int, version: int = 0) -> bytes:
    """Bytes that follow from the whole key, its size and a version: a mix-up is seen."""
    text = key + nbytes.to_bytes(8, "little") + version.to_bytes(8, "little")
    return hashlib.shake_128(text).digest(nbytes)


async def put(connector: Connector, objects: dict[bytes, bytes]) -> None:
    """Write all objects in one batch and require that each is stored."""
    items = [WriteItem(key, memoryview(data)) for key, data in objects.items()]
    assert await connector.write(items) == [None for _ in items]


async def get(
    connector: Connector, requests: Sequence[ReadRequest]
) -> list[tuple[ReadOutcome, bytes]]:
    """Read in one batch; give each outcome with the bytes it placed."""
    buffers = [bytearray(b"\xee" * request.nbytes) for request in requests]
    outcomes = await connector.read(requests, [memoryview(buffer) for buffer in buffers])
    return [
        (outcome, bytes(buffer[:outcome]) if isinstance(outcome, int) else b"")
        for outcome, buffer in zip(outcomes, buffers, strict=True)
    ]


async def get_whole(connector: Connector, sizes: dict[bytes, int]) -> list[bytes | None]:
    """Read whole objects of known sizes; None for a miss."""
    requests = [ReadRequest(key, 0, nbytes) for key, nbytes in sizes.items()]
    found = await get(connector, requests)
    return [None if outcome is None else data for outcome, data in found]


class ConnectorContract(ABC):
    """Tests of the ``Connector`` protocol."""

    @abstractmethod
    def make_connector(self) -> Connector:
        """Open a connector to an empty store. Called inside the event loop, once per test."""

    async def test_is_a_connector(self) -> None:
        """The type has every method of the protocol."""
        connector = self.make_connector()
        assert isinstance(connector, Connector)
        await connector.close()

    async def test_empty_batches(self) -> None:
        """A batch of nothing has no outcomes."""
        connector = self.make_connector()
        assert await connector.contains([]) == []
        assert await connector.read([], []) == []
        assert await connector.write([]) == []
        await connector.delete([])
        await connector.close()

    async def test_outcomes_keep_the_order(self) -> None:
        """One outcome per key, in the order of the batch, whatever order the store likes."""
        connector = self.make_connector()
        keys = [hashlib.sha256(bytes([number])).digest() for number in range(40)]
        objects = {key: payload_of(key, 100 + number) for number, key in enumerate(keys)}
        await put(connector, objects)
        backwards = {key: len(objects[key]) for key in reversed(keys)}
        assert await get_whole(connector, backwards) == [objects[key] for key in backwards]
        asked = [keys[3], b"absent", keys[1], keys[3]]
        assert await connector.contains(asked) == [True, False, True, True]
        await connector.close()

    async def test_b74_missing_key_does_not_shift_payloads(self) -> None:
        """A miss in the middle of a batch is a miss at its own place."""
        connector = self.make_connector()
        objects = {key: payload_of(key, 1024) for key in (b"k1", b"k2", b"k3", b"k4")}
        await put(connector, objects)
        await connector.delete([b"k2"])
        found = await get_whole(connector, dict.fromkeys(objects, 1024))
        assert found == [objects[b"k1"], None, objects[b"k3"], objects[b"k4"]]
        await connector.close()

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_b81_sizes_are_byte_exact(self, nbytes: int) -> None:
        """Small and odd sizes work as large ones do; an empty object is an object."""
        connector = self.make_connector()
        data = payload_of(b"key", nbytes)
        await put(connector, {b"key": data})
        assert await connector.contains([b"key"]) == [True]
        assert await get(connector, [ReadRequest(b"key", 0, nbytes)]) == [(nbytes, data)]
        await connector.close()

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, 511), (4096, 4096), (9_999, 1)])
    async def test_range_reads(self, offset: int, nbytes: int) -> None:
        """A range is the object's bytes from its offset on."""
        connector = self.make_connector()
        data = payload_of(b"key", 10_000)
        await put(connector, {b"key": data})
        found = await get(connector, [ReadRequest(b"key", offset, nbytes)])
        assert found == [(nbytes, data[offset : offset + nbytes])]
        await connector.close()

    @pytest.mark.parametrize(("offset", "there"), [(0, 1000), (990, 10), (1000, 0), (5000, 0)])
    async def test_range_behind_the_end_is_never_full(self, offset: int, there: int) -> None:
        """Asked for more than there is, a read is never full, and what it claims is right.

        Fewer bytes, a miss and an error are all fair answers.
        """
        connector = self.make_connector()
        data = payload_of(b"key", 1_000)
        await put(connector, {b"key": data})
        ((outcome, placed),) = await get(connector, [ReadRequest(b"key", offset, 2_000)])
        if isinstance(outcome, int):
            assert outcome <= there
            assert placed == data[offset : offset + outcome]
        await connector.close()

    async def test_several_ranges_of_one_key(self) -> None:
        """One batch may read a key more than once."""
        connector = self.make_connector()
        data = payload_of(b"key", 300)
        await put(connector, {b"key": data})
        requests = [ReadRequest(b"key", offset, 100) for offset in (200, 0, 100)]
        found = await get(connector, requests)
        assert [part for _, part in found] == [data[200:], data[:100], data[100:200]]
        await connector.close()

    @pytest.mark.parametrize(("first", "second"), [(5_000, 100), (100, 5_000), (4_096, 4_096)])
    async def test_overwrite_replaces_the_whole(self, first: int, second: int) -> None:
        """Nothing of the old object shows through the new one."""
        connector = self.make_connector()
        await put(connector, {b"key": payload_of(b"key", first, version=1)})
        newer = payload_of(b"key", second, version=2)
        await put(connector, {b"key": newer})
        assert await get(connector, [ReadRequest(b"key", 0, second)]) == [(second, newer)]
        ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, second + 1)])
        assert outcome != second + 1
        await connector.close()

    async def test_the_caller_may_reuse_its_buffer_after_a_write(self) -> None:
        """``data`` is borrowed until the outcome is known, and no longer."""
        connector = self.make_connector()
        buffer = bytearray(payload_of(b"key", 2_000))
        assert await connector.write([WriteItem(b"key", memoryview(buffer))]) == [None]
        buffer[:] = b"\xee" * 2_000
        assert await get_whole(connector, {b"key": 2_000}) == [payload_of(b"key", 2_000)]
        await connector.close()

    async def test_delete(self) -> None:
        """What is deleted is gone; a missing key is no error; neighbours stay."""
        connector = self.make_connector()
        objects = {key: payload_of(key, 64) for key in (b"a", b"b")}
        await put(connector, objects)
        await connector.delete([b"missing", b"a"])
        await connector.delete([b"a"])
        assert await connector.contains([b"a", b"b"]) == [False, True]
        assert await get_whole(connector, {b"a": 64, b"b": 64}) == [None, objects[b"b"]]
        await connector.close()

    async def test_b33_binary_keys_do_not_collide(self) -> None:
        """Any bytes make a key: separators, zeros, dots, non-UTF-8, prefixes of each other."""
        connector = self.make_connector()
        keys = [b"\0", b"\0\0", b"/", b"..", b"../x", b"a", b"a/", b"a/b", b"A", b"a%2Fb", b"a*"]
        keys += [b"\xff\xfe", b"\r\n", bytes(range(38)), bytes(range(38, 76)), b" ", b"{x}:y"]
        objects = {key: payload_of(key, 32) for key in keys}
        await put(connector, objects)
        assert await get_whole(connector, dict.fromkeys(keys, 32)) == list(objects.values())
        await connector.delete(keys[:1])
        assert await connector.contains(keys) == [False] + [True] * (len(keys) - 1)
        await connector.close()

    async def test_b60_concurrent_writers_of_one_key(self) -> None:
        """Writers of the same keys never fail each other; every object is one writer's whole."""
        connector = self.make_connector()
        keys = [b"key%d" % number for number in range(4)]

        async def write_all(version: int) -> None:
            await put(connector, {key: payload_of(key, 3_000, version) for key in keys})

        for _ in range(ROUNDS):
            await asyncio.gather(*(write_all(version) for version in range(WRITERS)))
            found = await get_whole(connector, dict.fromkeys(keys, 3_000))
            for key, data in zip(keys, found, strict=True):
                assert data in [payload_of(key, 3_000, version) for version in range(WRITERS)]
        await connector.close()

    async def test_reads_beside_writes_are_whole(self) -> None:
        """A reader sees the old object, the new one or none, never a part."""
        connector = self.make_connector()
        versions = [payload_of(b"key", 20_000, version) for version in range(WRITERS)]
        await put(connector, {b"key": versions[0]})
        found: list[bytes | None] = []

        async def read_once() -> None:
            found.extend(await get_whole(connector, {b"key": 20_000}))

        writes = [put(connector, {b"key": data}) for data in versions]
        await asyncio.gather(*writes, *(read_once() for _ in range(WRITERS)))
        assert len(found) == WRITERS
        assert all(data in versions for data in found if data is not None)
        await connector.close()

    async def test_close_twice(self) -> None:
        """The second close does nothing."""
        connector = self.make_connector()
        await put(connector, {b"key": b"x"})
        await connector.close()
        await connector.close()


class ListableContract(ABC):
    """Tests of the ``Listable`` protocol, for a connector that is both."""

    @abstractmethod
    def make_connector(self) -> Connector:
        """Open a connector to an empty store. Called inside the event loop, once per test."""

    async def listed(self, connector: Connector, prefix: bytes) -> list[tuple[bytes, int]]:
        """Return what a listing tells, in the order of the keys."""
        assert isinstance(connector, Listable)
        return sorted([(info.key, info.nbytes) async for info in connector.list(prefix)])

    async def test_an_empty_store_lists_nothing(self) -> None:
        """A listing of nothing ends."""
        connector = self.make_connector()
        assert await self.listed(connector, b"") == []
        assert await self.listed(connector, b"key") == []
        await connector.close()

    async def test_a_listing_tells_keys_and_sizes(self) -> None:
        """Every object once, with the size of its data and nothing that the store adds."""
        connector = self.make_connector()
        sizes = {b"small": 0, b"middle": 4096, b"large": 3_000_000, bytes(range(38)): 7, b"": 1}
        await put(connector, {key: payload_of(key, nbytes) for key, nbytes in sizes.items()})
        assert await self.listed(connector, b"") == sorted(sizes.items())
        await connector.close()

    async def test_a_prefix_is_plain_bytes(self) -> None:
        """No character of a prefix means anything, and half a byte of it is not enough."""
        connector = self.make_connector()
        keys = [
            b"a",
            b"a*",
            b"ab",
            b"b",
            b"[a]",
            b"a?c",
            b"\x61\x00",
            b"\x16",
            b"\\a",
            b"{a}",
            b"%61",
        ]
        await put(connector, dict.fromkeys(keys, b"data"))
        for prefix in (b"a", b"a*", b"[a", b"a?", b"\x06", b"\\", b"{", b"%", b"abc"):
            expected = sorted((key, 4) for key in keys if key.startswith(prefix))
            assert await self.listed(connector, prefix) == expected, prefix
        await connector.close()

    async def test_a_listing_follows_writes_and_deletes(self) -> None:
        """What was replaced has its new size, what was deleted is not told any more."""
        connector = self.make_connector()
        await put(connector, {b"k1": bytes(10), b"k2": bytes(10), b"k3": bytes(2_000_000)})
        await put(connector, {b"k1": bytes(2_000_000), b"k3": bytes(5)})
        await connector.delete([b"k2"])
        assert await self.listed(connector, b"k") == [(b"k1", 2_000_000), (b"k3", 5)]
        await connector.close()
