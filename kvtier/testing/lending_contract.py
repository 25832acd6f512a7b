"""What a connector that lends must do, beside ``ConnectorContract``::

class TestMyLoans(LendingContract):
    def make_connector(self) -> Connector:
        return MyConnector(...)
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from kvtier.errors import ConnectorRefusedError
from kvtier.interfaces import Connector, Lending, LendOutcome, Loan
from kvtier.testing.connector_contract import payload_of, put

SIZES: Final = {b"one": 65_536, b"two": 70_001, b"three": 3_000_000}


class LendingContract(ABC):
    """Tests of the ``Lending`` protocol, for a connector that is both. What is lent has 64 KiB."""

    @abstractmethod
    def make_connector(self) -> Connector:
        """Open a connector to an empty store. Called inside the event loop, once per test."""

    async def lent(self, connector: Connector, keys: Sequence[bytes]) -> list[LendOutcome]:
        """Return what a connector lends."""
        assert isinstance(connector, Lending)
        return await connector.lend(keys)

    async def filled(self) -> tuple[Connector, dict[bytes, bytes]]:
        """Open a connector to a store with some objects."""
        connector = self.make_connector()
        objects = {key: payload_of(key, nbytes) for key, nbytes in SIZES.items()}
        await put(connector, objects)
        return connector, objects

    async def test_whole_objects_are_lent_in_the_order_of_their_keys(self) -> None:
        """A key that is missing or cannot be hides none of the others."""
        connector, objects = await self.filled()
        outcomes = await self.lent(connector, [b"three", b"missing", b"one", b"", b"two"])
        three, missing, one, odd, two = outcomes
        assert missing is None
        assert odd is None or not isinstance(odd, Loan)
        for key, loan in ((b"one", one), (b"two", two), (b"three", three)):
            assert isinstance(loan, Loan)
            assert bytes(loan.view) == objects[key]
            assert loan.holds
            loan.release()
        assert await self.lent(connector, []) == []
        await connector.close()

    async def test_nobody_writes_through_a_loan(self) -> None:
        """It is for reading only."""
        connector, _ = await self.filled()
        (loan,) = await self.lent(connector, [b"one"])
        assert isinstance(loan, Loan)
        assert loan.view.readonly
        loan.release()
        await connector.close()

    async def test_a_loan_that_holds_is_what_was_lent(self) -> None:
        """Whatever becomes of the object: replaced, deleted, crowded by others."""
        connector, objects = await self.filled()
        loans = await self.lent(connector, list(SIZES))
        await put(connector, {key: payload_of(key, nbytes, 2) for key, nbytes in SIZES.items()})
        await connector.delete([b"two"])
        for number in range(8):
            key = b"other %d" % number
            await put(connector, {key: payload_of(key, 3_000_000)})
        for key, loan in zip(SIZES, loans, strict=True):
            assert isinstance(loan, Loan)
            data = bytes(loan.view)
            assert data == objects[key] or not loan.holds
            loan.release()
        (newer,) = await self.lent(connector, [b"one"])
        assert newer is None or isinstance(newer, Loan | ConnectorRefusedError)
        if isinstance(newer, Loan):
            assert bytes(newer.view) == payload_of(b"one", SIZES[b"one"], 2) or not newer.holds
            newer.release()
        await connector.close()

    async def test_any_thread_may_look_and_give_back(self) -> None:
        """The reader is another one than the loop's."""
        connector, objects = await self.filled()
        (loan,) = await self.lent(connector, [b"three"])
        assert isinstance(loan, Loan)

        def read(loan: Loan) -> tuple[bytes, bool]:
            data = bytes(loan.view)
            return data, loan.holds

        assert await asyncio.to_thread(read, loan) == (objects[b"three"], True)
        await asyncio.to_thread(loan.release)
        await connector.close()

    async def test_a_loan_outlives_its_connector_as_bytes_that_do_not_count(self) -> None:
        """To read it then is no fault of the system, and to give it back does nothing."""
        connector, _ = await self.filled()
        (loan,) = await self.lent(connector, [b"one"])
        assert isinstance(loan, Loan)
        await connector.close()
        assert not loan.holds
        assert len(bytes(loan.view)) == SIZES[b"one"]
        loan.release()
        (refused,) = await self.lent(connector, [b"one"])
        assert not isinstance(refused, Loan)
