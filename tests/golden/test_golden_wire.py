"""The wire's frames byte for byte: a change here is another version of the wire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.wire import (
    FROM_CLIENT,
    FROM_SERVER,
    Area,
    Contains,
    Data,
    Delete,
    Done,
    Found,
    Hello,
    Lease,
    Leased,
    Map,
    Mapped,
    Message,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Welcome,
    Write,
    encode,
)
from kvtier.wire_parser import Parser

GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("wire.json").read_text())
MESSAGES: dict[str, tuple[Message, int]] = {
    "hello": (Hello(1, 1, b"secret"), 0),
    "welcome": (Welcome(1), 0),
    "refused": (Refused(Status.REFUSED, "a token is needed"), 0),
    "contains": (Contains(1, (b"a", b"\x00\xff")), 0),
    "found": (Found(1, (True, False)), 0),
    "read": (Read(2, b"key", 4096, 2**21), 0),
    "data": (Data(2, Status.OK, ""), 2**21),
    "absent": (Data(3, Status.ABSENT, ""), 0),
    "write": (Write(4, bytes(range(38))), 65_537),
    "delete": (Delete(5, (b"key",)), 0),
    "done": (Done(2**32 - 1, Status.UNAVAILABLE, "später"), 0),
    "map": (Map(6, Area.STAGING), 0),
    "mapped": (Mapped(6, Status.OK, "", 2**62 + 1, 2**25), 0),
    "lease": (Lease(7, b"key"), 0),
    "leased": (Leased(7, Status.OK, "", 2**62 + 1, 4096, 2**21), 0),
    "release": (Release((7, 2**32 - 1)), 0),
    "take": (Take(8, b"key", 2**40, 4096, 65_537), 0),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_are_what_they_were(name: str) -> None:
    message, payload_bytes = MESSAGES[name]
    assert encode(message, payload_bytes).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_read_as_what_they_were(name: str) -> None:
    message, payload_bytes = MESSAGES[name]
    parser = Parser(FROM_CLIENT | FROM_SERVER)
    data = bytes.fromhex(GOLDEN[name])
    parser.buffer()[: len(data)] = data
    parser.received(len(data))
    frame = parser.next()
    assert frame is not None
    assert (frame.message, frame.payload_bytes) == (message, payload_bytes)


def test_nothing_golden_is_left_out() -> None:
    assert GOLDEN.keys() == MESSAGES.keys()
