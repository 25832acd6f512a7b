"""Whether what a connector answers can be true. Pure.

A wrong number of outcomes cannot be told apart, so all of them are void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.errors import ConnectorDataError, ConnectorError
from kvtier.interfaces import LendOutcome, Loan
from kvtier.types import ReadRequest, WriteItem


def checked_reads(
    requests: Sequence[ReadRequest], outcomes: object
) -> list[int | ConnectorError | None]:
    """Return for each read how many bytes came, None for a miss, or an error."""
    return [
        _checked_read(request, outcome)
        for request, outcome in zip(requests, _whole(requests, outcomes), strict=True)
    ]


def checked_writes(items: Sequence[WriteItem], outcomes: object) -> list[ConnectorError | None]:
    """Return for each write None or its error."""
    return [
        outcome if outcome is None or isinstance(outcome, ConnectorError) else _odd(outcome)
        for outcome in _whole(items, outcomes)
    ]


def checked_loans(keys: Sequence[bytes], outcomes: object) -> list[LendOutcome]:
    """Return for each key a loan, None for a miss, or an error."""
    return [
        outcome if outcome is None or isinstance(outcome, ConnectorError | Loan) else _odd(outcome)
        for outcome in _whole(keys, outcomes)
    ]


def checked_found(keys: Sequence[bytes], outcomes: object) -> list[bool]:
    """Return for each key whether it is there: anything but True is a no."""
    return [outcome is True for outcome in _whole(keys, outcomes)]


def _checked_read(request: ReadRequest, outcome: Any) -> int | ConnectorError | None:
    if outcome is None or isinstance(outcome, ConnectorError):
        return outcome
    if type(outcome) is not int or not 0 <= outcome <= request.nbytes:
        return _odd(outcome)
    return outcome


def _whole(asked: Sequence[Any], outcomes: object) -> Sequence[Any]:
    if not isinstance(outcomes, list | tuple) or len(outcomes) != len(asked):
        raise ConnectorDataError(f"an answer to {len(asked)} questions has not that many outcomes")
    return outcomes


def _odd(outcome: object) -> ConnectorDataError:
    return ConnectorDataError(f"an outcome is {type(outcome).__name__}, which it cannot be")
