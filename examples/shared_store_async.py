"""Share a daemon's cache with a program of your own that runs an event loop.

Two clients talk to `kvtier daemon`: what the first has written the second reads, straight into its
own memory, a few batches at a time. Any connector's URL works in the place of the daemon's, as in
`--url redis://host`.

    .venv/bin/python examples/shared_store_async.py [--url URL]
"""

from __future__ import annotations

import argparse
import asyncio

from daemon_beside import daemon

from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem

PAYLOAD_BYTES = 1_000_000
COUNT = 8


def payload(number: int) -> bytes:
    return bytes([number]) * PAYLOAD_BYTES


async def write(connector: Connector) -> None:
    """Write a batch. Each object has an outcome of its own: None, or why it was not stored."""
    items = [WriteItem(b"object %d" % n, memoryview(payload(n))) for n in range(COUNT)]
    for item, problem in zip(items, await connector.write(items), strict=True):
        if problem is not None:
            print(f"{item.key!r} was not stored: {problem}")


async def read(connector: Connector, numbers: range) -> int:
    """Read a batch into memory of ours; count what came."""
    buffers = [bytearray(PAYLOAD_BYTES) for _ in numbers]
    requests = [ReadRequest(b"object %d" % n, 0, PAYLOAD_BYTES) for n in numbers]
    outcomes = await connector.read(requests, [memoryview(buffer) for buffer in buffers])
    hits = 0
    for number, buffer, outcome in zip(numbers, buffers, outcomes, strict=True):
        if isinstance(outcome, ConnectorError):
            print(f"object {number}: {outcome}; do without it")
        elif outcome == PAYLOAD_BYTES:
            assert buffer == payload(number)
            hits += 1
    return hits


async def talk(url: str) -> None:
    first, second = connect(url), connect(url)
    await write(first)
    print("there:", await second.contains([b"object 0", b"object 99"]))
    # Calls may overlap as they like: they share a few connections.
    halves = range(COUNT // 2), range(COUNT // 2, COUNT + 1)
    hits = await asyncio.gather(*(read(second, half) for half in halves))
    print(f"read: {sum(hits)} of {sum(map(len, halves))}")
    await second.delete([b"object %d" % n for n in range(COUNT)])
    print("left:", await first.contains([b"object 0"]))
    await first.close()
    await second.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a connector's URL (a daemon that is started for it)")
    options = parser.parse_args()
    if options.url:
        asyncio.run(talk(options.url))
        return
    with daemon() as url:
        asyncio.run(talk(url))


if __name__ == "__main__":
    main()
