"""A cache server under hostile, dying and confused clients: it refuses, forgets, serves on."""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.constants import DAEMON_CONNECTIONS_MAX, WIRE_HEADER_BYTES_MAX, WIRE_PAYLOAD_BYTES_MAX
from kvtier.testing.engine_double import wait_until
from kvtier.wire import (
    WIRE_MAGIC,
    Contains,
    Data,
    Delete,
    Done,
    Found,
    Hello,
    Kind,
    Message,
    Read,
    Refused,
    Status,
    Write,
    encode,
)
from tests.lib.daemon import Daemon, daemon
from tests.lib.wire_client import WireClient

PAYLOAD = bytes(range(256)) * 4096
CONNECTIONS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    listen = ("127.0.0.1:0", f"unix:{folder}/socket")
    with daemon(f"--connections={CONNECTIONS}", "--dram=64MiB", listen=listen) as running:
        yield running
        check(running)
        assert running.stop() == 0


@pytest.fixture(params=[0, 1], ids=["tcp", "unix"])
def url(server: Daemon, request: pytest.FixtureRequest) -> str:
    number: int = request.param
    return server.urls[number]


def check(server: Daemon) -> None:
    """The server still serves, and nothing is held for anybody."""
    with closing(WireClient(server.urls[0]).hello()) as client:
        client.send(Write(1, b"check"), PAYLOAD)
        frame = client.take()
        assert frame is not None
        assert frame.message == Done(1, Status.OK, "")
        client.send(Read(2, b"check", 0, len(PAYLOAD)))
        assert client.read_answer() == (Data(2, Status.OK, ""), PAYLOAD)
    server.wait_until_nothing_is_held()


def prefix(kind: int, header_bytes: int, payload_bytes: int, version: int = 1) -> bytes:
    return struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, 0, header_bytes, payload_bytes)


class _Marker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._path),)


GARBAGE = {
    "b118_http": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "b108_long_header": prefix(Kind.WRITE, 0xFFFFFFFF, 0),
    "b108_header_over_the_limit": prefix(Kind.WRITE, WIRE_HEADER_BYTES_MAX + 1, 0),
    "b108_long_payload": prefix(Kind.WRITE, 4, 2**64 - 1),
    "b108_payload_over_the_limit": prefix(Kind.WRITE, 4, WIRE_PAYLOAD_BYTES_MAX + 1),
    "b118_another_version": prefix(Kind.READ, 4, 0, version=9),
    "unknown_kind": prefix(99, 0, 0),
    "a_servers_kind": prefix(Kind.DONE, 4, 0),
    "no_msgpack": prefix(Kind.CONTAINS, 4, 0) + b"\xc1\xc1\xc1\xc1",
    "b99_empty_key": encode(Contains(1, (b"",))),
    "b99_long_key": encode(Contains(1, (b"x" * 10_240,))),
    "hello_twice": encode(Hello(1, 1, b"")),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("welcome", [True, False], ids=["welcome", "stranger"])
def test_garbage_ends_the_connection_and_nothing_else(
    server: Daemon, url: str, name: str, *, welcome: bool
) -> None:
    with closing(WireClient(url)) as client:
        if welcome:
            client.hello()
        if not (name == "hello_twice" and not welcome):
            client.socket.sendall(GARBAGE[name])
        else:
            client.socket.sendall(GARBAGE[name] * 2)
        while (frame := client.take()) is not None:
            assert isinstance(frame.message, Refused) or name == "hello_twice", frame
    check(server)


def test_b98_a_pickle_is_never_opened(server: Daemon, url: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(_Marker(marker))
    header = prefix(Kind.WRITE, len(data), 0) + data
    for hostile in (data, header):
        with closing(WireClient(url).hello()) as client:
            client.socket.sendall(hostile)
            while client.take() is not None:
                pass
    with closing(WireClient(url).hello()) as client:
        client.send(Write(1, b"pickle"), data)
        assert client.take() is not None
        client.send(Read(2, b"pickle", 0, len(data)))
        assert client.read_answer()[1] == data
    assert not marker.exists()
    pickle.load(io.BytesIO(data))
    assert marker.exists(), "the pickle would have done nothing"


@pytest.mark.parametrize("sent", [0, 1, 100, len(PAYLOAD) - 1])
def test_b82_an_upload_that_breaks_off_is_not_stored(server: Daemon, url: str, sent: int) -> None:
    key = b"broken off %d" % sent
    with closing(WireClient(url).hello()) as client:
        client.send(Write(1, key), PAYLOAD[:sent], announced=len(PAYLOAD))
    with closing(WireClient(url).hello()) as client:
        client.send(Contains(1, (key,)))
        frame = client.take()
        assert frame is not None
        assert frame.message == Found(1, (False,))
        client.send(Read(2, key, 0, len(PAYLOAD)))
        assert client.read_answer() == (Data(2, Status.ABSENT, ""), b"")
    check(server)


def test_a_reader_that_dies_lets_go_of_what_it_was_given(server: Daemon, url: str) -> None:
    key = b"read by the dying"
    with closing(WireClient(url).hello()) as client:
        client.send(Write(1, key), PAYLOAD * 8)
        assert client.take() is not None
    with closing(WireClient(url, receive_bytes=4096).hello()) as client:
        for number in range(20):
            client.send(Read(number, key, 0, 8 * len(PAYLOAD)))
        wait_until(lambda: server.connections()["inflight_bytes"] > 0, "nothing was asked")
    check(server)


def test_connections_beyond_the_limit_are_refused_without_harm(server: Daemon) -> None:
    """A thousand that say nothing: those within the limit wait, the others are told so."""
    assert CONNECTIONS < DAEMON_CONNECTIONS_MAX
    host, port = server.urls[0].removeprefix("kvtier://").split(":")
    kept = WireClient(server.urls[1]).hello()
    before = server.connections()
    idlers = []
    for _ in range(1000):
        idler = socket.socket()
        idler.settimeout(20)
        idler.connect((host, int(port)))
        idlers.append(idler)
    wait_until(
        lambda: server.connections()["refused"] - before["refused"] == 1000 - CONNECTIONS + 1,
        f"not refused: {server.connections()}",
    )
    kept.send(Write(1, b"beside the crowd"), PAYLOAD)
    frame = kept.take()
    assert frame is not None
    assert frame.message == Done(1, Status.OK, "")
    for idler in idlers:
        idler.close()
    kept.close()
    check(server)


def test_a_client_of_another_version_is_told_so(url: str) -> None:
    with closing(WireClient(url)) as client:
        client.send(Hello(7, 9, b""))
        frame = client.take()
        assert frame is not None
        assert isinstance(frame.message, Refused)
        assert "spoken here are 1" in frame.message.text
        assert client.take() is None


def test_a_range_behind_the_end_is_what_there_is(url: str) -> None:
    with closing(WireClient(url).hello()) as client:
        client.send(Write(1, b"short"), b"0123456789")
        assert client.take() is not None
        for offset, nbytes, there in ((4, 100, b"456789"), (10, 1, b""), (2**63, 1, b"")):
            client.send(Read(2, b"short", offset, nbytes))
            assert client.read_answer() == (Data(2, Status.OK, ""), there)


def test_what_is_larger_than_memory_is_refused_and_goes_nowhere(server: Daemon, url: str) -> None:
    chunk = bytes(1 << 20)
    with closing(WireClient(url).hello()) as client:
        client.send(Write(1, b"huge"), announced=100 << 20)
        for _ in range(100):
            client.socket.sendall(chunk)
        frame = client.take()
        assert frame is not None
        message: Message = frame.message
        assert isinstance(message, Done)
        assert message.status is Status.REFUSED
        client.send(Contains(2, (b"huge",)))
        frame = client.take()
        assert frame is not None
        assert frame.message == Found(2, (False,))
    check(server)


def test_b88_what_a_slow_reader_is_sent_stays_as_it_is(server: Daemon, url: str) -> None:
    """Deleted meanwhile, and all memory wanted for others: the reader gets what it asked for."""
    key = b"read slowly"
    with closing(WireClient(url).hello()) as other:
        other.send(Write(1, key), PAYLOAD * 8)
        assert other.take() is not None
        with closing(WireClient(url, receive_bytes=4096).hello()) as slow:
            slow.send(Read(1, key, 0, 8 * len(PAYLOAD)))
            wait_until(lambda: server.connections()["inflight_bytes"] > 0, "nothing was asked")
            other.send(Delete(2, (key,)))
            assert other.take() is not None
            for number in range(100):
                other.send(Write(3, b"other %d" % number), bytes([number]) * len(PAYLOAD))
                frame = other.take()
                assert frame is not None
                assert frame.message == Done(3, Status.OK, "")
            message, data = slow.read_answer()
            assert message == Data(1, Status.OK, "")
            assert data == PAYLOAD * 8
    check(server)
