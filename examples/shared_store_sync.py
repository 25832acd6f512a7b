"""Share a daemon's cache with a program of your own that has threads and no event loop.

`KeyedCache` keeps payloads under keys of yours. It has a little memory of its own, goes to the
daemon for the rest, and verifies what comes back. Two of them stand for two processes here: what
the first has put the second gets. Any connector's URL works in the place of the daemon's, as in
`--url redis://host`.

    .venv/bin/python examples/shared_store_sync.py [--url URL]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from daemon_beside import daemon

from kvtier import (
    Cache,
    CacheConfig,
    GroupKind,
    KeyedCache,
    KVGroup,
    KVLayout,
    Namespace,
    RemoteConfig,
)
from kvtier.clock import SystemClock
from kvtier.constants import MIB

PAYLOAD_BYTES = 1_000_000
KEYS = [b"page %d" % number for number in range(8)]
POLL_S = 0.01

# All on which the bytes depend: who differs in any of it finds nothing of the others.
GROUP = KVGroup(GroupKind.FULL, layers=(0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="bfloat16")
NAMESPACE = Namespace("made-up weights", KVLayout((GROUP,)))
SCHEME = "the pages of an example, version 1"

clock = SystemClock()


@contextlib.contextmanager
def process(url: str) -> Iterator[KeyedCache]:
    """What each process has: a cache with 32 MiB, and the store behind it."""
    config = CacheConfig(32 * MIB, slab_bytes=MIB, remotes=(RemoteConfig(url),))
    cache = Cache(config)
    keyed = KeyedCache(cache, NAMESPACE, SCHEME)
    try:
        yield keyed
        while cache.stats().writes_queued:  # What was put is on its way; leave when it is there.
            clock.sleep(POLL_S)
    finally:
        keyed.close()
        cache.close()


def payload(key: bytes) -> bytes:
    return key[-1:] * PAYLOAD_BYTES


def run(url: str) -> None:
    with process(url) as first:
        outcomes = first.put([(key, payload(key)) for key in KEYS]).wait()
        print("put: ", *(outcome.value for outcome in outcomes))
    with process(url) as second:
        keys = [*KEYS, b"page 99"]
        buffers = [bytearray(PAYLOAD_BYTES) for _ in keys]
        outcomes = second.get(keys, buffers).wait()
        print("got: ", *(outcome.value for outcome in outcomes))
        same = all(buffer == payload(key) for key, buffer in zip(KEYS, buffers, strict=False))
        print("same bytes:", same)
        print("again:", *(each.value for each in second.get(KEYS, buffers[:-1]).wait()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a connector's URL (a daemon that is started for it)")
    options = parser.parse_args()
    if options.url:
        run(options.url)
        return
    with daemon() as url:
        run(url)


if __name__ == "__main__":
    main()
