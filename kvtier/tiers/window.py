"""Addresses behind an arena, for shards that others lend: they are read where they lie.

::

    | the arena's slots ................ | lent | lent |      | lent | ...
    0                                start

A slot behind the arena names a loan, so that records, plans and workers take it for any other one.
Addresses are never used twice: what a late plan names is gone, and not another chunk. They mean
something in this process alone, and only to workers that read with the host's own instructions; a
worker says so with ``open``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvtier.constants import LENT_BYTES_MAX
from kvtier.errors import TierError
from kvtier.interfaces import Loan
from kvtier.types import Placement, Slot


class Window:
    """Owns the loans. Used under the cache's lock, but for ``open`` and ``view``."""

    def __init__(self, start: int, *, lent_bytes_max: int = LENT_BYTES_MAX) -> None:
        """``start`` is where the arena ends."""
        self._start = start
        self._next = start
        self._lent_bytes_max = lent_bytes_max
        self._slots: dict[int, Slot] = {}
        self._loans: dict[int, Loan] = {}
        self._lent_bytes = 0
        self._readers: set[int] = set()
        self._opening = threading.Lock()

    @property
    def lent_bytes(self) -> int:
        """Bytes of the slots that are given out, whether or not anything is lent there yet."""
        return self._lent_bytes

    @property
    def offsets(self) -> set[int]:
        """Where the slots begin that are given out."""
        return set(self._slots)

    def open(self, worker: int, *, reads: bool) -> None:
        """Note whether a worker ``reads`` what lies here; it may change its mind with its pool."""
        with self._opening:
            self._readers = (self._readers | {worker}) if reads else (self._readers - {worker})

    def serves(self, workers: Iterable[Placement]) -> bool:
        """Tell whether all of these workers read what lies here."""
        readers = self._readers
        return all(place.worker in readers for place in workers)

    def holds_slot(self, slot: Slot) -> bool:
        """Tell a slot of the window from one of the arena."""
        return slot.offset >= self._start

    def reserve(self, nbytes: int) -> Slot | None:
        """Give out addresses; None: as much is lent as may be. The caller ends with ``free``."""
        if self._lent_bytes + nbytes > self._lent_bytes_max:
            return None
        slot = self._slots[self._next] = Slot(self._next, nbytes)
        self._next += nbytes
        self._lent_bytes += nbytes
        return slot

    def lend(self, slot: Slot, loan: Loan) -> None:
        """Have a slot's bytes be those of a loan, as long as it; once. The loan becomes ours."""
        assert slot.offset in self._slots, "lent to nobody"
        assert slot.offset not in self._loans, "lent twice"
        assert len(loan.view) == slot.nbytes, "a loan of another length"
        self._loans[slot.offset] = loan

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes, for reading. Raises ``TierError`` where nothing is lent any more.

        The view never faults; whether its bytes still were the right ones, ``intact`` tells after.
        """
        loan = self._loans.get(slot.offset)
        if loan is None:
            raise TierError("what a slot was lent has been given back")
        return loan.view

    def intact(self, slots: Iterable[Slot]) -> bool:
        """Tell whether what was read in these slots before was what had been lent."""
        loans = [self._loans.get(slot.offset) for slot in slots if self.holds_slot(slot)]
        return all(loan is not None and loan.holds for loan in loans)

    def free(self, slot: Slot) -> None:
        """Take addresses back, and give back what was lent there."""
        del self._slots[slot.offset]
        self._lent_bytes -= slot.nbytes
        loan = self._loans.pop(slot.offset, None)
        if loan is not None:
            loan.release()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        if sum(slot.nbytes for slot in self._slots.values()) != self._lent_bytes:
            raise AssertionError("slots given out do not add up to the bytes lent")
        if not self._loans.keys() <= self._slots.keys():
            raise AssertionError("a loan in no slot")
