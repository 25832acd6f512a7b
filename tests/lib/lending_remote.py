"""A toy remote that lends its memory, and takes it away again as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier.errors import ConnectorRefusedError
from kvtier.interfaces import LendOutcome
from kvtier.types import ReadRequest
from tests.lib.remote_lab import ToyRemote


class ToyLoan:
    """A ``Loan`` of some bytes, which a test may change or take away."""

    def __init__(self, remote: LendingRemote, data: bytearray) -> None:
        self._remote = remote
        self.data = data
        self.taken = False
        self.released = 0

    @property
    def view(self) -> memoryview:
        self._remote.looked_at(self)
        return memoryview(self.data).toreadonly()

    @property
    def holds(self) -> bool:
        self._remote.looked_at(self)
        return not (self.taken or self._remote.gone)

    def take(self) -> None:
        """As a server does: first it hangs up, then somebody else's bytes lie there."""
        self.taken = True
        self.data[:] = bytes(byte ^ 0x5A for byte in self.data)

    def release(self) -> None:
        self.released += 1


class LendingRemote(ToyRemote):
    """Lends copies of its objects, so that a test may spoil one. ``lend`` is an operation.

    ``looked_at`` is called with a loan before anybody reads it, or asks whether it holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gone = False
        self.refuses = False
        self.loans: list[ToyLoan] = []
        self.looked_at: Callable[[ToyLoan], None] = lambda _: None
        self.turn = threading.Lock()

    async def lend(self, keys: Sequence[bytes]) -> list[LendOutcome]:
        async def lend() -> list[LendOutcome]:
            return [await self._lent(key) for key in keys]

        return await self._answer("lend", len(keys), lend)

    async def _lent(self, key: bytes) -> LendOutcome:
        if self.refuses:
            return ConnectorRefusedError("nothing is lent today")
        (there,) = await self.store.contains([key])
        if not there:
            return None
        (nbytes,) = [info.nbytes async for info in self.store.list(key)]
        data = bytearray(nbytes)
        await self.store.read([ReadRequest(key, 0, nbytes)], [memoryview(data)])
        self.loans.append(ToyLoan(self, data))
        return self.loans[-1]

    @property
    def lent(self) -> int:
        """Loans that have not been given back."""
        assert all(loan.released <= 1 for loan in self.loans), "given back twice"
        return sum(not loan.released for loan in self.loans)
