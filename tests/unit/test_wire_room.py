"""What a connection's parser keeps: little, but for as long as a long header comes."""

from __future__ import annotations

import pytest

from kvtier.constants import WIRE_HEADER_BYTES_MAX
from kvtier.wire import FROM_CLIENT, FROM_SERVER, Contains, Data, Status, encode
from kvtier.wire_parser import Parser

LITTLE = 4096
LONG = Contains(1, tuple(b"%0100d" % number for number in range(600)))


def feed(parser: Parser, data: bytes) -> int:
    """Give a parser what it has room for; return how much that was."""
    space = parser.buffer()
    count = min(len(space), len(data))
    space[:count] = data[:count]
    parser.received(count)
    return count


@pytest.mark.parametrize("before", [0, 1, 3000])
def test_b95_a_long_header_takes_room_while_it_comes(before: int) -> None:
    short = Contains(2, (b"k" * 1000,))
    data = before // 1000 * encode(short) + encode(LONG)
    assert LITTLE < len(encode(LONG)) <= WIRE_HEADER_BYTES_MAX
    parser, found, most = Parser(FROM_CLIENT), [], 0
    while data:
        data = data[feed(parser, data) :]
        while (frame := parser.next()) is not None:
            found.append(frame.message)
        most = max(most, len(parser.buffer()))
    assert found == [*(before // 1000 * [short]), LONG]
    assert most > LITTLE
    assert len(parser.buffer()) == LITTLE


def test_a_payload_that_nobody_wants_takes_no_room() -> None:
    parser = Parser(FROM_SERVER)
    feed(parser, encode(Data(1, Status.OK, ""), 10 * WIRE_HEADER_BYTES_MAX))
    frame = parser.next()
    assert frame is not None
    parser.place(None)
    while left := parser.payload_left:
        assert feed(parser, b"x" * left) == min(left, WIRE_HEADER_BYTES_MAX)
    assert len(parser.buffer()) == LITTLE
