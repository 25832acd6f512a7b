"""A script that uses every method of a connector once, whatever goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import payload_of
from kvtier.types import ReadRequest, WriteItem


class Script:
    """Writes, looks up, reads, lists, deletes; keeps what came of it.

    Fails at once when a read gives other bytes than were written. ``sizes`` are the objects' by
    their keys; the first is deleted in the end. ``requests`` is what is read, beside an object that
    nobody has written.
    """

    def __init__(self, sizes: dict[bytes, int], requests: Sequence[ReadRequest]) -> None:
        self._objects = {key: payload_of(key, nbytes) for key, nbytes in sizes.items()}
        self._absent = b"absent" + next(iter(sizes))
        self._requests = [*requests, ReadRequest(self._absent, 0, 10)]
        self.written: list[ConnectorError | None] = []
        self.there: list[bool] = []
        self.read: list[int | ConnectorError | None] = []
        self.listed: dict[bytes, int] | ConnectorError | None = None
        self.left: list[bool] = []

    async def run(self, connector: Connector) -> None:
        """Use every method once. Faults are outcomes; wrong bytes are an ``AssertionError``."""
        items = [WriteItem(key, memoryview(data)) for key, data in self._objects.items()]
        self.written = await connector.write(items)
        self.there = await connector.contains([*self._objects, self._absent])
        await self._read(connector)
        if isinstance(connector, Listable):
            try:
                self.listed = {info.key: info.nbytes async for info in connector.list(b"")}
            except ConnectorError as error:
                self.listed = error
        await connector.delete([next(iter(self._objects)), self._absent])
        self.left = await connector.contains([*self._objects])
        assert len(self.written) == len(self.left) == len(self._objects)
        assert len(self.there) == len(self._objects) + 1

    async def _read(self, connector: Connector) -> None:
        buffers = [bytearray(b"\xee" * request.nbytes) for request in self._requests]
        self.read = await connector.read(self._requests, [memoryview(each) for each in buffers])
        for request, buffer, outcome in zip(self._requests, buffers, self.read, strict=True):
            if isinstance(outcome, int):
                data = self._objects[request.key][request.offset : request.offset + outcome]
                assert bytes(buffer[:outcome]) == data, "wrong bytes"

    async def clear_up(self, connector: Connector) -> None:
        """Delete what is left of it."""
        await connector.delete([*self._objects])

    def assert_well(self) -> None:
        """Nothing went wrong, as far as anybody can tell who has not listed."""
        count = len(self._objects)
        assert self.written == [None] * count
        assert self.there == [True] * count + [False]
        assert self.read == [*(request.nbytes for request in self._requests[:-1]), None]
        assert self.left == [False] + [True] * (count - 1)
