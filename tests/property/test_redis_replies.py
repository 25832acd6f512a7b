"""Answers of Redis come out of a stream the same, wherever it happens to be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions as redis_errors

from kvtier_connectors.redis.replies import (
    ANSWER_BYTES_MAX,
    BUFFER_BYTES,
    Bulk,
    Command,
    Replies,
    Reply,
)

SIZES = st.one_of(st.integers(0, 40), st.integers(BUFFER_BYTES - 3, BUFFER_BYTES + 3))


def source_of(stream: bytes, cuts: list[int]) -> Callable[[memoryview], int]:
    """Give the stream in pieces: at most as many bytes at a time as the cuts say, in turn."""
    position, turn = 0, 0

    def receive(into: memoryview) -> int:
        nonlocal position, turn
        count = min(len(into), cuts[turn % len(cuts)], len(stream) - position)
        into[:count] = stream[position : position + count]
        position, turn = position + count, turn + 1
        return count

    return receive


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, Command, Reply, bytes]:
    """Draw what comes, the command it answers, the answer, and what its buffer then holds."""
    kind = draw(st.sampled_from(["+", "-", ":", "nil", "bulk", "into"]))
    if kind == "+":
        return b"+OK\r\n", Command((b"SET",), 0), b"OK", b""
    if kind == "-":
        return b"-ERR no\r\n", Command((b"SET",), 0), redis_errors.ResponseError("ERR no"), b""
    if kind == ":":
        number = draw(st.integers(-9, 10**9))
        return b":%d\r\n" % number, Command((b"EXISTS",), 0), number, b""
    if kind == "nil":
        return b"$-1\r\n", Command((b"GET",), 0), None, b""
    data = bytes(n * 7 % 256 for n in range(draw(SIZES)))
    stream = b"$%d\r\n%b\r\n" % (len(data), data)
    if kind == "bulk":
        return stream, Command((b"GET",), 0), Bulk(data, len(data)), b""
    head, room = draw(SIZES), draw(SIZES)
    command = Command((b"GET",), 0, memoryview(bytearray(b"\xee" * room)), head)
    placed = data[head : head + room].ljust(room, b"\xee")
    return stream, command, Bulk(data[:head], len(data)), placed


@given(st.lists(answers(), max_size=8), st.lists(st.integers(1, 30_000), min_size=1, max_size=5))
def test_answers_come_out_wherever_the_stream_is_cut(
    wanted: list[tuple[bytes, Command, Reply, bytes]], cuts: list[int]
) -> None:
    replies = Replies(source_of(b"".join(stream for stream, *_ in wanted), cuts))
    for _, command, reply, placed in wanted:
        found = replies.next(command)
        if isinstance(reply, Exception):
            assert (type(found), str(found)) == (type(reply), str(reply))
        else:
            assert found == reply
        assert bytes(command.into or b"") == placed
    with pytest.raises(redis_errors.ConnectionError):
        replies.next(Command((b"GET",), 0))


@given(st.binary(max_size=60), st.integers(1, 9))
def test_any_bytes_are_an_answer_or_an_error(stream: bytes, cut: int) -> None:
    replies = Replies(source_of(stream, [cut]))
    with contextlib.suppress(redis_errors.RedisError):
        for _ in range(len(stream) + 1):
            replies.next(Command((b"GET",), 0))
        raise AssertionError("the stream has an end")


@pytest.mark.parametrize(
    "stream",
    [
        b"$-2\r\n",
        b"$x\r\n",
        b":\r\n",
        b"*1\r\n",
        b"$600000000\r\n",
        b"?\r\n",
        b"\r\n",
        b"$1\r\nab\r\n",
    ],
)
def test_what_is_not_the_protocol_is_refused(stream: bytes) -> None:
    with pytest.raises(redis_errors.InvalidResponse):
        Replies(source_of(stream, [100])).next(Command((b"GET",), 0))


def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(redis_errors.InvalidResponse, match="without an end"):
        Replies(source_of(b"+" * 10_000, [1000])).next(Command((b"GET",), 0))


def test_a_value_that_nobody_has_room_for_is_passed_over() -> None:
    data = bytes(ANSWER_BYTES_MAX + 50_000)
    replies = Replies(source_of(b"$%d\r\n%b\r\n:7\r\n" % (len(data), data), [4000]))
    found = replies.next(Command((b"GET",), 0))
    assert found == Bulk(data[:ANSWER_BYTES_MAX], len(data))
    assert replies.next(Command((b"EXISTS",), 0)) == 7
