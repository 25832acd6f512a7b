"""``Sharded``: several connectors as one, each key with one of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

import xxhash

from kvtier.errors import ConfigError, ConnectorError
from kvtier.interfaces import Connector, Listable, ReadOutcome
from kvtier.registry import connect
from kvtier.types import KeyInfo, ReadRequest, WriteItem

SHARDS_MAX: Final = 256

_T = TypeVar("_T")
_Name = TypeVar("_Name", bound=Hashable)


class Sharded:
    """A ``Connector`` that keeps each object with one of several, chosen by rendezvous hashing.

    Every name draws a number for a key, and the highest has it (Thaler and Ravishankar, "Using
    name-based mappings to increase hit rates", 1998): all clients with the same names agree without
    talking, and when a name is added or taken away only its own share of the keys moves. What lies
    elsewhere then is a miss. A connector that fails costs its own keys only. It is ``Listable`` if
    all of them are, and closes them.
    """

    def __init__(self, inner: Mapping[str, Connector]) -> None:
        """Take connectors by a name that lasts, such as their host.

        Raises ``ConfigError`` where there is none.
        """
        if not inner:
            raise ConfigError("nothing to shard over")
        self._inner = dict(inner)
        self._seeds = {name: xxhash.xxh3_64_intdigest(name.encode()) for name in inner}
        if all(isinstance(each, Listable) for each in inner.values()):
            # Set on the object, not on the class: a type tells what it can do by its methods.
            vars(self)["list"] = self._list

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sharded+redis://host1,host2?ttl_s=60`` or ``sharded+file:///mnt/a,/mnt/b``.

        A connector for each host or, where there is none, for each path; user, password and
        options are those of all. Clients agree that write the hosts alike, in any order.
        """
        return cls({name: connect(each) for name, each in _places(url).items()})

    def owner_of(self, key: bytes) -> str:
        """Return the name of the connector that has a key."""
        return max(
            self._seeds, key=lambda name: (xxhash.xxh3_64_intdigest(key, self._seeds[name]), name)
        )

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask each for its keys, at the same time."""
        shares = self._shares(keys)
        answers = [self._inner[name].contains(_picked(keys, own)) for name, own in shares.items()]
        return _merged(shares, await asyncio.gather(*answers))

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Let each fill the buffers of its keys, at the same time."""
        shares = self._shares([request.key for request in requests])
        answers = [
            self._inner[name].read(_picked(requests, own), _picked(into, own))
            for name, own in shares.items()
        ]
        return _merged(shares, await asyncio.gather(*answers))

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Let each store its objects, at the same time."""
        shares = self._shares([item.key for item in items])
        answers = [self._inner[name].write(_picked(items, own)) for name, own in shares.items()]
        return _merged(shares, await asyncio.gather(*answers))

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Let each delete its keys, at the same time."""
        shares = self._shares(keys)
        calls = [self._inner[name].delete(_picked(keys, own)) for name, own in shares.items()]
        await asyncio.gather(*calls)

    async def close(self) -> None:
        """Close them all."""
        for each in self._inner.values():
            await each.close()

    def _shares(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        shares: defaultdict[str, list[int]] = defaultdict(list)
        for number, key in enumerate(keys):
            shares[self.owner_of(key)].append(number)
        return dict(shares)

    async def _list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        for name, each in self._inner.items():
            assert isinstance(each, Listable), "checked when it was made"
            async for info in each.list(prefix):
                # What lies with one whose key it is not any more can never be read.
                if self.owner_of(info.key) == name:
                    yield info


def _picked(values: Sequence[_T], numbers: Sequence[int]) -> list[_T]:
    return [values[number] for number in numbers]


def _merged(shares: Mapping[_Name, Sequence[int]], answers: Sequence[Sequence[_T]]) -> list[_T]:
    """Put the answers back into the order of the batch."""
    found = {
        number: value
        for numbers, values in zip(shares.values(), answers, strict=True)
        for number, value in zip(numbers, values, strict=True)
    }
    return [found[number] for number in range(len(found))]


def _places(url: str) -> dict[str, str]:
    """Return the URLs that one URL stands for, by the host or path that each has."""
    scheme, _, rest = url.partition("+")
    parts = urlsplit(rest)
    if parts.scheme.endswith(("+cluster", "+sentinel")):
        raise ConfigError(f"{scheme}+{parts.scheme}:// names several hosts of one store already")
    login, at, hosts = parts.netloc.rpartition("@")
    names = (hosts or parts.path).split(",")
    if not all(names) or len(set(names)) < len(names) or len(names) > SHARDS_MAX:
        raise ConfigError(
            f"{scheme}+{parts.scheme}:// names 1 to {SHARDS_MAX} hosts or paths by comma, each once"
        )
    options = f"?{parts.query}" if parts.query else ""
    if not hosts:
        return {path: f"{parts.scheme}://{path}{options}" for path in names}
    behind = parts.path + options
    return {host: f"{parts.scheme}://{login}{at}{host}{behind}" for host in names}
