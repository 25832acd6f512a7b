"""What a cache server's operator reads of those that are refused: a line each, and no flood."""

from __future__ import annotations

import ssl

import pytest

from kvtier.constants import LOG_INTERVAL_S
from kvtier_server.refusals import Refusals, handshake_fault, peer_name


def test_a_peer_is_told_of_once_a_minute_however_often_it_comes() -> None:
    log = Refusals("refused")
    assert log.line("10.0.0.7", "the token is wrong", 0.0) == (
        "10.0.0.7 is refused: the token is wrong"
    )
    for tenth in range(1, 600):
        assert log.line("10.0.0.7", "the token is wrong", tenth / 10) is None
    assert log.line("10.0.0.7", "the token is wrong", LOG_INTERVAL_S) == (
        "10.0.0.7 is refused: the token is wrong (599 more since the last line)"
    )
    assert log.line("10.0.0.7", "the token is wrong", LOG_INTERVAL_S + 1) is None


def test_others_are_told_of_meanwhile_and_of_many_a_few() -> None:
    log = Refusals("refused")
    lines = [log.line(f"10.0.{number // 256}.{number % 256}", "why", 0.0) for number in range(5000)]
    told = [line for line in lines if line is not None]
    assert lines[:2] == ["10.0.0.0 is refused: why", "10.0.0.1 is refused: why"]
    assert len(told) < 100
    after = log.line("10.9.9.9", "why", LOG_INTERVAL_S)
    assert after == f"10.9.9.9 is refused: why ({5000 - len(told)} more since the last line)"


def test_a_peer_is_named_without_its_port() -> None:
    assert peer_name(("10.0.0.7", 40123), None) == "10.0.0.7"
    assert peer_name(("::1", 40123, 0, 0), None) == "::1"
    assert peer_name("", 1000) == "user 1000"
    assert peer_name(None, None) == "an unknown peer"


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("WRONG_VERSION_NUMBER", "kvtiers://"),
        ("HTTP_REQUEST", "--http"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "--client-ca"),
        ("NO_SHARED_CIPHER", "NO_SHARED_CIPHER"),
    ],
)
def test_a_handshake_that_fails_is_explained(reason: str, part: str) -> None:
    error = ssl.SSLError(1, "it failed")
    error.reason = reason
    assert part in handshake_fault(error)
