"""A chunk that a remote on this host lends: verified where it lies, copied nowhere.

It is borrowed whole before any of it is looked at, so that what cannot be lent is found out before
anybody uses a part. A shard that fails its checksum is damaged only if the loan still holds after
that was seen; else it was somebody else's memory by then.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from kvtier.cache.below.fill import Arriving, NotLentError, ObjectGoneError, UnwantedError
from kvtier.constants import REMOTE_STEP_BYTES
from kvtier.errors import (
    ConnectorRefusedError,
    ConnectorUnavailableError,
    FormatError,
    ShardError,
)
from kvtier.interfaces import Loan
from kvtier.keys import shard_key
from kvtier.shard_format import parse_header
from kvtier.stored_shard import first_bytes
from kvtier.tiers.arrival import Arrival, Expected, Step, check_expected, read_steps
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.incoming import raise_for_other_codec
from kvtier.types import ShardId


class Borrowing:
    """Borrows all shards of a chunk and verifies them, the first sections of each first."""

    #: What is lent is as long as the shard.
    stored_bytes = None

    def __init__(self, channel: Channel, arriving: Arriving, deadline: float) -> None:
        self._channel = channel
        self._arriving = arriving
        self._deadline = deadline

    async def run(self) -> None:
        """Return once all is lent and verified.

        Raises ``NotLentError`` where it has to be copied, else what a read raises. The loans are
        the window's from ``lend`` on, and given back here before that.
        """
        loans = await self._borrowed()
        arrivals: dict[ShardId, tuple[Loan, Arrival]] = {}
        for shard, loan in loans.items():
            self._arriving.lend(shard, loan)
            arrivals[shard] = loan, Arrival(loan.view, self._arriving.expected[shard])
        for shard, step in self._steps():
            if not self._arriving.wanted():
                raise UnwantedError("nobody waits for this chunk")
            loan, arrival = arrivals[shard]
            await self._channel.run(partial(_verify, arrival, loan, step))
            self._arriving.progress(shard, step.sections.stop)

    async def _borrowed(self) -> dict[ShardId, Loan]:
        """Return a loan of each shard, as long as it is to be; or raise, and then keep none."""
        expected = self._arriving.expected
        keys = [shard_key(each.chunk, shard) for shard, each in expected.items()]
        outcomes = await asyncio.gather(
            *(self._channel.lend(key, deadline=self._deadline) for key in keys),
            return_exceptions=True,
        )
        loans = {s: o for s, o in zip(expected, outcomes, strict=True) if isinstance(o, Loan)}
        with ExitStack() as undo:
            for loan in loans.values():
                undo.callback(loan.release)
            _check_lent(outcomes)
            for shard, loan in loans.items():
                with _while_lent(loan):
                    _check_head(loan.view, expected[shard])
            undo.pop_all()
        return loans

    def _steps(self) -> list[tuple[ShardId, Step]]:
        steps = [
            (number, shard, step)
            for shard, expected in self._arriving.expected.items()
            for number, step in enumerate(read_steps(expected.geometry, REMOTE_STEP_BYTES))
        ]
        return [(shard, step) for _, shard, step in sorted(steps, key=lambda each: each[0])]


def _check_lent(outcomes: Sequence[Loan | BaseException | None]) -> None:
    """Raise for the first shard that is not lent, what keeps all from being lent coming last."""
    for outcome in sorted(outcomes, key=lambda each: isinstance(each, ConnectorRefusedError)):
        if outcome is None:
            raise ObjectGoneError(errno.ENOENT, "no such object")
        if isinstance(outcome, ConnectorRefusedError):
            raise NotLentError(str(outcome)) from outcome
        if isinstance(outcome, BaseException):
            raise outcome


def _check_head(data: memoryview, expected: Expected) -> None:
    """Raise unless a sealed shard begins here, the right one and of its length."""
    _, encoded = first_bytes(data)
    if encoded:
        raise NotLentError("it is encoded, and has to be decoded to somewhere")
    header = parse_header(data)
    raise_for_other_codec(header, expected)
    check_expected(header, expected)
    if len(data) != expected.geometry.shard_bytes:
        raise FormatError("an object of another length than its shard")


def _verify(arrival: Arrival, loan: Loan, step: Step) -> None:
    with _while_lent(loan):
        arrival.take(step)


@contextmanager
def _while_lent(loan: Loan) -> Iterator[None]:
    """Blame nobody for bytes that are somebody else's by now."""
    try:
        yield
    except ShardError as error:
        if not loan.holds:
            raise ConnectorUnavailableError("what was lent has gone") from error
        raise
