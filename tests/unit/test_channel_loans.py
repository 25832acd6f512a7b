"""Asking a remote for loans: whatever a connector answers, each wish ends and no loan is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import REMOTE_TRIES_MAX
from kvtier.errors import (
    ConnectorDataError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.tiers.remote.channel import Channel
from tests.lib.lending_remote import LendingRemote, ToyLoan
from tests.lib.remote_lab import ToyRemote

FAR = 1e12


class Lab:
    """A channel to a remote that lends."""

    def __init__(self, remote: ToyRemote, deadline_s: float = 5.0) -> None:
        self.remote = remote
        self.channel = Channel(
            lambda: self.remote,
            SystemClock(),
            random.Random(1),
            lambda: None,
            connections=2,
            deadline_s=deadline_s,
            name="test",
        )

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.channel.submit(work).result(20.0)

    def lend(self, *keys: bytes) -> list[Any]:
        async def all_of_them() -> list[Any]:
            wishes = (self.channel.lend(key, deadline=FAR) for key in keys)
            return await asyncio.gather(*wishes, return_exceptions=True)

        outcomes: list[Any] = self.do(all_of_them())
        return outcomes


@pytest.fixture
def labs() -> Iterator[Callable[..., Lab]]:
    opened: list[Lab] = []

    def make(**how: Any) -> Lab:
        opened.append(Lab(LendingRemote(), **how))
        return opened[-1]

    yield make
    for lab in opened:
        lab.remote.release()
        lab.channel.close(5.0)


def test_each_wish_gets_its_loan(labs: Callable[..., Lab]) -> None:
    lab = labs()
    for key in (b"a", b"b"):
        lab.remote.put(key, key * 100)
    first, none, second = lab.lend(b"a", b"none", b"b")
    assert none is None
    assert (bytes(first.view), bytes(second.view)) == (b"a" * 100, b"b" * 100)


def test_only_a_connector_that_lends_is_asked() -> None:
    lab = Lab(ToyRemote())
    assert not lab.channel.lends
    lab.channel.close(5.0)
    lender = Lab(LendingRemote())
    assert lender.channel.lends
    lender.channel.close(5.0)


@pytest.mark.parametrize("answer", [[], [None, None], "all", [3], [b"bytes"]])
def test_an_answer_that_cannot_be_is_a_fault(labs: Callable[..., Lab], answer: Any) -> None:
    lab = labs()
    lab.remote.twist["lend"] = lambda _: answer
    (outcome,) = lab.lend(b"a")
    assert isinstance(outcome, ConnectorDataError)


def test_a_fault_that_passes_is_tried_again_and_a_refusal_is_not(labs: Callable[..., Lab]) -> None:
    lab = labs()
    lab.remote.put(b"a", b"data")
    lab.remote.twist["lend"] = lambda _: [ConnectorUnavailableError("away")]
    (outcome,) = lab.lend(b"a")
    assert isinstance(outcome, ConnectorUnavailableError)
    assert lab.remote.calls["lend"] == REMOTE_TRIES_MAX
    lab.remote.twist["lend"] = lambda _: [ConnectorRefusedError("not today")]
    (outcome,) = lab.lend(b"a")
    assert isinstance(outcome, ConnectorRefusedError)
    assert lab.remote.calls["lend"] == REMOTE_TRIES_MAX + 1


def test_a_connector_that_raises_fails_the_wish_alone(labs: Callable[..., Lab]) -> None:
    lab = labs()

    def broken(outcomes: object) -> object:
        raise ZeroDivisionError(outcomes)

    lab.remote.twist["lend"] = broken
    (outcome,) = lab.lend(b"a")
    assert isinstance(outcome, ConnectorUnavailableError)


def test_a_wish_that_is_overdue_is_given_up(labs: Callable[..., Lab]) -> None:
    lab = labs(deadline_s=0.05)
    lab.remote.put(b"a", b"data")
    lab.remote.hold("lend")
    (outcome,) = lab.lend(b"a")
    assert isinstance(outcome, ConnectorTimeoutError)
    lab.remote.release()
    assert isinstance(lab.remote, LendingRemote)
    loans: list[ToyLoan] = lab.remote.loans
    assert not loans, "it had been lent to nobody"
