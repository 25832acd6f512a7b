"""What a client reads where it lies, and from where it uploads. All belongs to the loop's thread.

A lease is an object that is held for one connection. It ends with its release or with the
connection, and only so: the client looks whether that is still there once it has read.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
from collections.abc import Iterable
from typing import Final

from kvtier.constants import (
    DAEMON_LEASE_BYTES_MAX,
    DAEMON_LEASE_S_MAX,
    DAEMON_LEASES_MAX,
    DAEMON_STAGING_BYTES,
    DAEMON_STAGINGS_MAX,
)
from kvtier.interfaces import Clock
from kvtier.tiers.owned_memory import SharedFile
from kvtier_server.objects import Held, Objects

#: The share of DRAM that may be leased: the rest is for whoever stores.
_SHARE: Final = 2


class LeaseRoom:
    """Bytes that all connections hold leased: half of DRAM at most."""

    def __init__(self, dram_bytes: int) -> None:
        self._bytes_max = dram_bytes // _SHARE
        self.used_bytes = 0

    def take(self, nbytes: int) -> bool:
        """Count bytes; False: they would be too many, and are not counted."""
        if self.used_bytes + nbytes > self._bytes_max:
            return False
        self.used_bytes += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Count bytes that are let go."""
        self.used_bytes -= nbytes


class Leases:
    """What one connection holds, by the numbers of its requests."""

    def __init__(self, room: LeaseRoom, clock: Clock, connection: socket.socket) -> None:
        """``connection`` becomes ours: a descriptor of the one that the leases end with."""
        self._room = room
        self._clock = clock
        self._held: dict[int, tuple[Held, int, float]] = {}  # with its bytes, and since when
        self._bytes = 0
        self._connection = connection

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, number: int, held: Held) -> bool:
        """Keep an object for the client; False: it stays the caller's.

        That is too much, or there is one of that number.
        """
        nbytes = len(held.data)
        full = len(self._held) >= DAEMON_LEASES_MAX or number in self._held
        if full or self._bytes + nbytes > DAEMON_LEASE_BYTES_MAX or not self._room.take(nbytes):
            return False
        self._held[number] = (held, nbytes, self._clock.now())
        self._bytes += nbytes
        return True

    def release(self, numbers: Iterable[int]) -> bool:
        """End leases; False: there is none of such a number."""
        for number in numbers:
            if number not in self._held:
                return False
            held, nbytes, _ = self._held.pop(number)
            self._bytes -= nbytes
            self._room.give(nbytes)
            held.release()
        return True

    def overdue(self, now_s: float) -> bool:
        """Tell whether one is held for longer than an honest client needs."""
        first = next(iter(self._held.values()), None)
        return first is not None and now_s - first[2] > DAEMON_LEASE_S_MAX

    def end(self) -> int:
        """Hang up, then let go of everything; return how many leases that were.

        In this order: whoever reads in the mapping finds out before anything there changes.
        """
        # The client may have hung up itself.
        with self._connection as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        count = len(self._held)
        self.release(list(self._held))
        return count


class Staging:
    """A file that one client writes uploads into, for us to copy from."""

    def __init__(self, objects: Objects) -> None:
        """Raises ``OSError``: there are no more files."""
        self.objects = objects
        self.file = SharedFile("kvtier-staging", DAEMON_STAGING_BYTES)
        mapping = mmap.mmap(self.file.writable, self.file.nbytes, prot=mmap.PROT_READ)
        #: Whoever copies from it keeps it mapped.
        self.view = memoryview(mapping)


class Stagings:
    """The staging files of all clients: a bounded number of them."""

    def __init__(self) -> None:
        self._by_number: dict[int, Staging] = {}

    def open(self, objects: Objects) -> Staging | None:
        """Make one for a client; None: there are too many."""
        if len(self._by_number) >= DAEMON_STAGINGS_MAX:
            return None
        try:
            staging = Staging(objects)
        except OSError:
            return None
        self._by_number[staging.file.number] = staging
        return staging

    def part(self, number: int, offset: int, nbytes: int, objects: Objects) -> memoryview | None:
        """Return bytes of a client's file; None: there is no such file of these objects."""
        staging = self._by_number.get(number)
        if staging is None or staging.objects is not objects:
            return None
        part = staging.view[offset : offset + nbytes]
        return part if len(part) == nbytes else None

    def close(self, staging: Staging) -> None:
        """Close a file; what the client has mapped stays."""
        del self._by_number[staging.file.number]
        staging.file.close()
