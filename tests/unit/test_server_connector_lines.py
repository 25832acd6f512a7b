"""The client of the cache server against servers that lie, are late, or hang up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtier.constants import (
    MIB,
    WIRE_KEY_BYTES_MAX,
    WIRE_KEYS_MAX,
    WIRE_PAYLOAD_BYTES_MAX,
    WIRE_TOKEN_BYTES_MAX,
)
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import (
    Contains,
    Data,
    Done,
    Found,
    Message,
    Read,
    Refused,
    Status,
    Welcome,
    Write,
)
from kvtier_connectors.server.errors import STATUSES, failure
from kvtier_connectors.server.settings import parse_url
from tests.lib.scripted_server import Peer, scripted

NBYTES = 1000
POISON = 0xEE


async def read_one(url: str, nbytes: int = NBYTES) -> tuple[object, bytes]:
    connector = connect(url)
    buffer = bytearray([POISON]) * nbytes
    (outcome,) = await connector.read([ReadRequest(b"key", 0, nbytes)], [memoryview(buffer)])
    await connector.close()
    return outcome, bytes(buffer)


async def test_more_bytes_than_were_asked_for_go_nowhere(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.take()
        assert isinstance(asked, Read)
        peer.send(Data(asked.request, Status.OK, ""), b"x" * (NBYTES + 1))
        await peer.take()

    async with scripted(tmp_path, script) as url:
        outcome, buffer = await read_one(url)
    assert isinstance(outcome, ConnectorDataError)
    assert buffer == bytes([POISON]) * NBYTES


@pytest.mark.parametrize("sent", [0, 1, NBYTES - 1])
async def test_b80_a_payload_that_breaks_off_is_a_fault(tmp_path: Path, sent: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.take()
        assert isinstance(asked, Read)
        peer.send(Data(asked.request, Status.OK, ""), b"x" * sent, announced=NBYTES)
        peer.close()

    async with scripted(tmp_path, script) as url:
        outcome, _ = await read_one(url)
    assert isinstance(outcome, ConnectorUnavailableError)


async def test_b83_a_late_answer_is_never_taken_for_the_next_one(tmp_path: Path) -> None:
    asked_twice = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        first = await peer.take()
        assert isinstance(first, Read)
        # It keeps talking, so the client has no reason to give the connection up.
        peer.send(Found(77, ()))
        second = await peer.take()
        assert isinstance(second, Read)
        asked_twice.set()
        peer.send(Data(first.request, Status.OK, ""), b"1" * NBYTES)
        peer.send(Data(second.request, Status.OK, ""), b"2" * NBYTES)
        await peer.take()

    async with scripted(tmp_path, script, timeout_s=0.7) as url:
        connector = connect(url)
        buffers = [bytearray([POISON]) * NBYTES for _ in range(2)]
        outcomes = [
            (await connector.read([ReadRequest(key, 0, NBYTES)], [memoryview(buffer)]))[0]
            for key, buffer in zip((b"k1", b"k2"), buffers, strict=True)
        ]
        await connector.close()
    assert asked_twice.is_set()
    assert isinstance(outcomes[0], ConnectorTimeoutError)
    assert outcomes[1] == NBYTES
    assert buffers == [bytes([POISON]) * NBYTES, b"2" * NBYTES]


async def test_a_server_that_says_nothing_is_left_for_a_new_connection(tmp_path: Path) -> None:
    async def silent(peer: Peer) -> None:
        await peer.welcome()
        await peer.take()
        await peer.take()

    async def sound(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.take()
        assert isinstance(asked, Read)
        peer.send(Data(asked.request, Status.OK, ""), b"2" * NBYTES)
        await peer.take()

    async with scripted(tmp_path, silent, sound, timeout_s=0.7) as url:
        connector = connect(url)
        buffer = memoryview(bytearray(NBYTES))
        request = ReadRequest(b"key", 0, NBYTES)
        (first,) = await connector.read([request], [buffer])
        (second,) = await connector.read([request], [buffer])
        await connector.close()
    assert isinstance(first, ConnectorTimeoutError)
    assert second == NBYTES


async def test_a_cancelled_read_lets_go_of_its_buffer(tmp_path: Path) -> None:
    """Half of the payload has come; the rest goes nowhere and the connection is still good."""
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        first = await peer.take()
        assert isinstance(first, Read)
        half = NBYTES // 2
        peer.send(Data(first.request, Status.OK, ""), b"1" * half, announced=NBYTES)
        half_sent.set()
        second = await peer.take()
        assert isinstance(second, Read)
        peer.send_raw(b"1" * half)
        peer.send(Data(second.request, Status.OK, ""), b"2" * NBYTES)
        go_on.set()
        await peer.take()

    async with scripted(tmp_path, script) as url:
        connector = connect(url)
        first, second = bytearray(NBYTES), bytearray(NBYTES)
        request = ReadRequest(b"key", 0, NBYTES)
        reading = asyncio.create_task(connector.read([request], [memoryview(first)]))
        await half_sent.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        first[:] = bytes([POISON]) * NBYTES
        assert await connector.read([request], [memoryview(second)]) == [NBYTES]
        await connector.close()
    assert go_on.is_set()
    assert first == bytes([POISON]) * NBYTES
    assert second == b"2" * NBYTES


ODD_ANSWERS: dict[str, Message] = {
    "found": Found(0, (True,)),
    "done": Done(0, Status.OK, ""),
    "another welcome": Welcome(1),
    "welcome to another version": Welcome(9),
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
async def test_an_answer_of_another_kind_is_a_fault(tmp_path: Path, name: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.take()
        peer.send(ODD_ANSWERS[name])
        await peer.take()

    async with scripted(tmp_path, script) as url:
        outcome, _ = await read_one(url)
    assert isinstance(outcome, ConnectorDataError)


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64), b"KVTW\x07" * 9])
async def test_b118_a_server_of_another_kind_is_told_from_ours(tmp_path: Path, data: bytes) -> None:
    async def script(peer: Peer) -> None:
        peer.send_raw(data)
        await peer.take()

    async with scripted(tmp_path, script) as url:
        outcome, _ = await read_one(url)
    assert isinstance(outcome, ConnectorDataError | ConnectorRefusedError)
    assert "wire" in str(outcome)


@pytest.mark.parametrize("status", Status)
async def test_every_status_is_an_outcome(tmp_path: Path, status: Status) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        while True:
            asked = await peer.take()
            if isinstance(asked, Read):
                peer.send(Data(asked.request, status, "why"))
            elif isinstance(asked, Write):
                peer.send(Done(asked.request, status, "why"))

    async with scripted(tmp_path, script) as url:
        connector = connect(url)
        data = memoryview(bytearray(0))
        (read,) = await connector.read([ReadRequest(b"key", 0, 0)], [data])
        (written,) = await connector.write([WriteItem(b"key", memoryview(b"x"))])
        await connector.close()
    if status is Status.OK:
        assert (read, written) == (0, None)
    elif status is Status.ABSENT:
        assert read is None
        assert isinstance(written, ConnectorUnavailableError)
    else:
        assert type(read) is type(written) is STATUSES[status]
        assert isinstance(failure(status, ""), ConnectorError)


async def test_a_refusal_is_every_calls_outcome(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.take()
        peer.send(Refused(Status.REFUSED, "not today"))
        peer.close()

    async with scripted(tmp_path, script) as url:
        outcome, _ = await read_one(url)
    assert isinstance(outcome, ConnectorRefusedError)
    assert str(outcome) == "not today"


async def test_keys_are_asked_for_in_as_few_requests_as_hold_them(tmp_path: Path) -> None:
    asked: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.welcome()
        while True:
            message = await peer.take()
            assert isinstance(message, Contains)
            asked.append(len(message.keys))
            peer.send(Found(message.request, tuple(key[-1:] == b"1" for key in message.keys)))

    short = [b"%d" % number for number in range(WIRE_KEYS_MAX + 1)]
    long = [bytes(WIRE_KEY_BYTES_MAX - 1) + b"%d" % (number % 2) for number in range(100)]
    none = [b"", bytes(WIRE_KEY_BYTES_MAX + 1)]
    async with scripted(tmp_path, script) as url:
        connector = connect(url)
        assert await connector.contains(short) == [key[-1:] == b"1" for key in short]
        assert asked == [WIRE_KEYS_MAX, 1]
        answers = await connector.contains([*long, *none])
        assert answers == [*[bool(number % 2) for number in range(100)], False, False]
        assert 2 <= len(asked[2:]) <= 4
        for key in none:
            (read,) = await connector.read([ReadRequest(key, 0, 0)], [memoryview(bytearray(0))])
            assert isinstance(read, ConnectorRefusedError)
            (written,) = await connector.write([WriteItem(key, memoryview(b"x"))])
            assert isinstance(written, ConnectorRefusedError)
        await connector.close()
        assert await connector.contains([b"1"]) == [False]
        (read,) = await connector.read([ReadRequest(b"1", 0, 0)], [memoryview(bytearray(0))])
        assert isinstance(read, ConnectorUnavailableError)


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_the_outcome_of_a_write_that_failed_keeps_none_of_its_memory(
    tmp_path: Path, *, hangs_up: bool
) -> None:
    """It may be kept for long, and the memory is unmapped or used for something else."""
    ended = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.take()  # And little of what it carries.
        if not hangs_up:
            await ended.wait()
        peer.close()

    data = bytearray(8 * MIB)
    async with scripted(tmp_path, script, timeout_s=30 if hangs_up else 0.3) as url:
        connector = connect(url)
        (outcome,) = await connector.write([WriteItem(b"key", memoryview(data))])
        await connector.close()
        ended.set()
    assert type(outcome) is (ConnectorUnavailableError if hangs_up else ConnectorTimeoutError)
    await asyncio.sleep(0)  # The loop keeps what it has thrown into us until its next turn.
    data.append(0)  # No ``BufferError``: nobody has a view of it.


BAD_URLS = {
    "kvtier://": "kvtier://host:port",
    "kvtier://host:99999": "the port",
    "kvtier://host/path": "kvtier://host:port",
    "kvtier://user:secret@host": "token_file",
    "kvtier://host?tokenfile=x": "did you mean 'token_file'?",
    "kvtier://host?ca=x": "has no 'ca'",
    "kvtier://host?connections=0": "connections",
    "kvtier://host?timeout_s=x": "timeout_s",
    "kvtier://host?token_name=x": "token_name needs a token_file",
    "kvtier://host?token_file=/none": "token file /none",
    "kvtier+unix://host/path": "three slashes",
    "kvtiers://host?cert=x": "cert needs key",
    "kvtiers://host?hostname=maybe": "hostname",
    "kvtiers://host?ca=/none": "ca, cert, key",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_be_says_why(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert BAD_URLS[url] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_tokens_are_read_from_files_and_never_shown(tmp_path: Path) -> None:
    one, many, long = tmp_path / "one", tmp_path / "many", tmp_path / "long"
    one.write_text("# a comment\nsecret\n")
    many.write_text("ann secret-1\nben secret-2\n")
    long.write_text("x" * (WIRE_TOKEN_BYTES_MAX + 1))
    assert parse_url(f"kvtier://host?token_file={one}").token == b"secret"
    settings = parse_url(f"kvtier://[::1]:7071?token_file={many}&token_name=ben")
    assert (settings.host, settings.port, settings.token) == ("::1", 7071, b"secret-2")
    assert "secret" not in repr(settings)
    for url in (f"{many}", f"{many}&token_name=cat", f"{long}"):
        with pytest.raises(ConfigError, match="allowed is one token"):
            parse_url(f"kvtier://host?token_file={url}")
    assert WIRE_PAYLOAD_BYTES_MAX > 0
