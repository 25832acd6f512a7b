"""A cache server among strangers: who has no business here gets nothing, costs nothing, ends."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.constants import MIB, WIRE_STALL_S_MAX
from kvtier.errors import ConnectorError, ConnectorRefusedError, ConnectorUnavailableError
from kvtier.registry import connect
from kvtier.testing.engine_double import wait_until
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import (
    WIRE_MAGIC,
    Area,
    Contains,
    Delete,
    Done,
    Found,
    Hello,
    Kind,
    Lease,
    Leased,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Write,
    encode,
)
from tests.lib.certificates import Authority, make_authority
from tests.lib.daemon import Daemon, daemon
from tests.lib.process_figures import figures
from tests.lib.wire_client import WireClient

SECRETS = {name: f"secret-of-{name}" for name in ("ann", "ben", "admin", "redis", "stranger")}
MINE, YOURS = b"what ann has stored" * 5000, b"what ben would have there" * 5000
#: How long a server may take to hang up: it looks once a second, on a busy machine.
CUT_OFF_S_MAX = WIRE_STALL_S_MAX + 15.0
TICK_S = 0.5


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Daemon]:
    for name, text in SECRETS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tokens").write_text("".join(f"{n} {SECRETS[n]}\n" for n in ("ann", "ben")))
    options = (
        f"--token-file={tmp_path}/tokens",
        f"--admin-token-file={tmp_path}/admin",
        f"--remote=redis://kv@127.0.0.1:1?password_file={tmp_path}/redis",
        "--dram=64MiB",
        "--log-level=debug",
    )
    with daemon(*options, listen=("127.0.0.1:0", f"unix:{tmp_path}/socket")) as running:
        yield running


def client_of(running: Daemon, name: str) -> WireClient:
    return WireClient(running.urls[1]).hello(SECRETS[name].encode(), version=2)


def asked(client: WireClient, message: Read) -> tuple[Status, bytes]:
    client.send(message)
    answer, data = client.read_answer()
    return answer.status, data


def leased(client: WireClient, number: int, key: bytes) -> Leased:
    client.send(Lease(number, key))
    answer = client.answer()
    assert isinstance(answer, Leased)
    return answer


def stored(client: WireClient, key: bytes, data: bytes) -> None:
    client.send(Write(9, key), data)
    assert client.answer() == Done(9, Status.OK, "")


def test_b102_no_request_of_another_credential_reaches_an_object(guarded: Daemon) -> None:
    """Nothing of what the wire knows: to find, read, lease, map, take, replace, delete, release."""
    with closing(client_of(guarded, "ann")) as ann, closing(client_of(guarded, "ben")) as ben:
        stored(ann, b"key", MINE)
        assert leased(ann, 1, b"key").status is Status.OK
        staging, descriptors = ann.map(Area.STAGING)
        ben.send(Contains(1, (b"key",)))
        assert ben.answer() == Found(1, (False,))
        assert asked(ben, Read(2, b"key", 0, len(MINE))) == (Status.ABSENT, b"")
        assert leased(ben, 3, b"key").status is Status.ABSENT
        mapped, none = ben.map(Area.OBJECTS)
        assert (mapped.status, none) == (Status.ABSENT, [])
        ben.send(Take(4, b"key", staging.region, 0, 100))
        taken = ben.answer()
        assert isinstance(taken, Done)
        assert taken.status is Status.ABSENT
        ben.send(Delete(5, (b"key",)))
        assert ben.answer() == Done(5, Status.OK, "")
        stored(ben, b"key", YOURS)
        assert asked(ben, Read(6, b"key", 0, len(YOURS))) == (Status.OK, YOURS)
        assert asked(ann, Read(7, b"key", 0, len(MINE))) == (Status.OK, MINE)
        # A lease is ended by whom it belongs to: by its number alone nobody else ends it.
        ben.send(Release((1,)))
        refused = ben.answer()
        assert isinstance(refused, Refused)
        assert refused.status is Status.CORRUPT
        ann.send(Release((1,)))
        assert asked(ann, Read(8, b"key", 0, len(MINE))) == (Status.OK, MINE)
        for each in descriptors:
            os.close(each)
    assert guarded.stop() == 0


async def test_no_secret_is_in_any_line_of_a_log(guarded: Daemon, tmp_path: Path) -> None:
    """Nor a key: at the level that tells most, of what is right, wrong, garbage and away."""
    for name in ("ann", "stranger"):
        (file := tmp_path / f"{name}-token").write_text(SECRETS[name])
        connector = connect(f"{guarded.urls[0]}?token_file={file}")
        outcomes = await connector.write([WriteItem(b"key-of-ann", memoryview(MINE))])
        told = str(outcomes[0])
        assert outcomes == [None] or "token" in told
        assert not any(secret in told for secret in SECRETS.values())
        await connector.close()
    for token in SECRETS.values():
        for path in ("/v1/stats", "/v1/config", "/v1/quotas", "/v1/namespaces"):
            try:
                text = guarded.get_text(path, token)
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read().decode()
            assert not any(secret in text for secret in SECRETS.values())
    with closing(WireClient(guarded.urls[0])) as client:
        client.socket.sendall(encode(Hello(1, 1, SECRETS["ann"].encode())) * 2)
        client.take()
    with closing(WireClient(guarded.urls[0])) as client:
        client.socket.sendall(SECRETS["ann"].encode())
        refused = client.answer()
        assert isinstance(refused, Refused)
    wait_until(
        lambda: guarded.get("/v1/kvtier/stats", SECRETS["admin"]) is not None, "it does not serve"
    )
    assert guarded.stop() == 0
    log = "\n".join(guarded.log)
    assert "INFO Shutting down" in log, "not at the level that tells most"
    for secret in (*SECRETS.values(), "key-of-ann", b"key-of-ann".hex()):
        assert secret not in log


@dataclass
class Certificates:
    """Whom a server's authority vouches for, and others."""

    own: Authority
    other: Authority
    folder: Path

    def expired(self) -> tuple[Path, Path]:
        pair = self.folder / "expired", self.folder / "expired-key"
        self.own.vouch("client", *pair, valid_days=-1)
        return pair

    def another_ones(self) -> tuple[Path, Path]:
        return self.other.client_cert, self.other.client_key


OUTSIDERS: dict[str, Callable[[Certificates], tuple[Path, Path]]] = {
    "an expired certificate": Certificates.expired,
    "a certificate of another authority": Certificates.another_ones,
}


async def test_certificates_that_are_none_of_ours_let_nobody_in(tmp_path: Path) -> None:
    """Not even with a token that is right; and our own client is served before and after."""
    made = Certificates(
        make_authority(tmp_path / "own"), make_authority(tmp_path / "other"), tmp_path
    )
    own = made.own
    (tokens := tmp_path / "tokens").write_text("ann secret\n")
    options = (
        f"--tls-cert={own.server_cert}",
        f"--tls-key={own.server_key}",
        f"--client-ca={own.ca}",
        f"--token-file={tokens}",
    )
    item, request = WriteItem(b"key", memoryview(MINE)), ReadRequest(b"key", 0, len(MINE))
    with daemon(*options) as running:
        trusting = f"{running.urls[0]}?ca={own.ca}"
        insider = connect(f"{trusting}&cert={own.client_cert}&key={own.client_key}")
        assert await insider.write([item]) == [None]
        for name, pair in OUTSIDERS.items():
            cert, key = pair(made)
            for token in ("", f"&token_file={tokens}&token_name=ann"):
                outsider = connect(f"{trusting}&cert={cert}&key={key}{token}&timeout_s=20")
                (outcome,) = await outsider.write([item])
                assert isinstance(outcome, ConnectorRefusedError | ConnectorUnavailableError), name
                buffer = memoryview(bytearray(len(MINE)))
                (found,) = await outsider.read([request], [buffer])
                assert isinstance(found, ConnectorError), name
                assert not any(buffer)
                await outsider.close()
        # Nor does a client talk to a server that shows a certificate of somebody else.
        fooled = connect(trusting.replace(str(own.ca), str(made.other.ca)))
        assert isinstance((await fooled.write([item]))[0], ConnectorRefusedError)
        await fooled.close()
        buffer = memoryview(bytearray(len(MINE)))
        assert await insider.read([request], [buffer]) == [len(MINE)]
        assert buffer == MINE
        await insider.close()
        assert running.stop() == 0


def prefix(kind: Kind, header_bytes: int, payload_bytes: int) -> bytes:
    return struct.pack("<4sBBHIQ", WIRE_MAGIC, 1, kind, 0, header_bytes, payload_bytes)


def test_b108_lengths_that_lie_cost_no_memory(tmp_path: Path) -> None:
    """Not the bytes that they announce, whether they are refused or waited for."""
    with daemon("--dram=64MiB", "--connections=1000") as running, ExitStack() as left:
        lies = [
            prefix(Kind.WRITE, 0xFFFFFFFF, 0),
            prefix(Kind.WRITE, 10, 2**64 - 1),
            encode(Write(1, b"huge"), 512 * MIB - 1),
            encode(Write(1, b"more than fits"), 65 * MIB),
            encode(Read(1, b"none", 0, 512 * MIB - 1)),
            prefix(Kind.CONTAINS, 65_536, 0) + b"\xdc\x04\x00" * 1000,
        ]

        def lie(count: int) -> None:
            for _ in range(count):
                for data in lies:
                    client = left.enter_context(closing(WireClient(running.urls[0]).hello()))
                    client.socket.sendall(data)

        lie(10)
        wait_until(lambda: running.connections()["open"] == 40, "what is refused stays")
        before = figures(running.process.pid)
        lie(90)
        wait_until(lambda: running.connections()["open"] == 400, "what is refused stays")
        after = figures(running.process.pid)
        # 360 connections wait for what was announced; each has its buffer, and little beside.
        assert after.anonymous_bytes - before.anonymous_bytes < 360 * 100_000
        assert running.connections()["inflight_bytes"] == 0
        assert running.stop() == 0


def test_descriptors_that_nobody_asked_for_are_not_kept(tmp_path: Path) -> None:
    with daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running:
        with closing(WireClient(running.urls[0]).hello(version=2)) as client:
            before = figures(running.process.pid).descriptors
            for number in range(300):
                frame = encode(Contains(number, (b"key",)))
                assert socket.send_fds(client.socket, [frame], [client.socket.fileno()] * 8)
                assert client.answer() == Found(number, (False,))
            assert figures(running.process.pid).descriptors <= before + 1
        assert running.stop() == 0


class Slow:
    """A connection that goes on as slowly as can be, and notes when it was cut off."""

    def __init__(self, name: str, connection: socket.socket, drip: bytes) -> None:
        self.name = name
        self.connection = connection
        self._drip = drip

    def go_on(self) -> None:
        """Send one byte more, if it is one that sends."""
        if self._drip:
            self.connection.send(self._drip[:1])
            self._drip = self._drip[1:]


def slow_ones(plain: Daemon, secure: Daemon, left: ExitStack) -> list[Slow]:
    """One of each kind that never ends by itself."""
    made: list[Slow] = []

    def add(name: str, client: WireClient, begun: bytes = b"", drip: bytes = b"") -> None:
        left.callback(client.close)
        if begun:
            client.socket.sendall(begun)
        made.append(Slow(name, client.socket, drip))

    hello, ask = encode(Hello(1, 1, b"t" * 200)), encode(Contains(1, (b"key" * 100,)))
    for way, url in zip(("TCP", "a Unix socket"), plain.urls, strict=True):
        add(f"{way}: silent", WireClient(url))
        add(f"{way}: a hello, a byte at a time", WireClient(url), b"", hello)
        add(f"{way}: half a frame", WireClient(url).hello(), ask[:30])
        add(f"{way}: a frame, a byte at a time", WireClient(url).hello(), b"", ask)
        upload = encode(Write(1, b"slow"), 1000)
        add(f"{way}: a payload, a byte at a time", WireClient(url).hello(), upload, bytes(999))
    tls = secure.urls[0].replace("kvtiers", "kvtier")
    add("TLS: silent", WireClient(tls))
    add("TLS: half a handshake", WireClient(tls), bytes.fromhex("160301020001"))
    return made


def test_slow_and_half_open_connections_are_cut_off_and_hold_up_nobody(tmp_path: Path) -> None:
    own = make_authority(tmp_path / "own")
    tls = (f"--tls-cert={own.server_cert}", f"--tls-key={own.server_key}")
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    with (
        daemon("--dram=64MiB", listen=listen) as plain,
        daemon("--dram=64MiB", *tls) as secure,
        selectors.DefaultSelector() as selector,
        closing(WireClient(plain.urls[0]).hello()) as good,
        ExitStack() as left,
    ):
        begun_s = time.monotonic()
        for slow in slow_ones(plain, secure, left):
            selector.register(slow.connection, selectors.EVENT_READ, slow)
        while selector.get_map():
            late = [key.data.name for key in selector.get_map().values()]
            assert time.monotonic() - begun_s < CUT_OFF_S_MAX, f"not cut off: {late}"
            for key, _ in selector.select(TICK_S):
                slow = key.data
                if hung_up(slow.connection):
                    selector.unregister(slow.connection)
            for key in list(selector.get_map().values()):
                try:
                    key.data.go_on()
                except OSError:
                    selector.unregister(key.fileobj)
            stored(good, b"meanwhile", MINE)
            assert asked(good, Read(1, b"meanwhile", 0, len(MINE))) == (Status.OK, MINE)
        wait_until(lambda: plain.connections()["open"] == 1, "something stays")
        assert plain.connections()["stalled"] == 10
        assert secure.connections()["open"] == 0
        assert plain.stop() == secure.stop() == 0


def hung_up(connection: socket.socket) -> bool:
    """Read what there is; True at its end."""
    try:
        return not connection.recv(4096)
    except ConnectionError:
        return True


@pytest.mark.parametrize("way", [0, 1], ids=["tcp", "unix"])
def test_a_client_that_sends_no_more_is_gone(tmp_path: Path, way: int) -> None:
    """Half a connection is none: what it has asked for before is let go of."""
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    with daemon("--dram=64MiB", listen=listen) as running:
        with closing(WireClient(running.urls[way]).hello()) as client:
            stored(client, b"key", MINE)
            client.send(Write(1, b"half"), MINE[:5], announced=len(MINE))
            client.socket.shutdown(socket.SHUT_WR)
            assert client.take() is None
        wait_until(lambda: running.connections()["open"] == 0, "it stays")
        stats = running.get("/v1/stats")
        assert not stats["cache"]["stores_inflight"] + stats["connections"]["inflight_bytes"]
        assert running.stop() == 0


def test_a_client_whose_machine_is_gone_is_asked_for(tmp_path: Path) -> None:
    """The kernel asks an idle TCP client whether it is there, within half a minute."""
    with daemon("--dram=64MiB") as running, closing(WireClient(running.urls[0]).hello()) as client:
        server = running.urls[0].rsplit(":", 1)[1]
        ours = client.socket.getsockname()[1]
        wanted = (f":{int(server):04X}", f":{ours:04X}")

        def timer() -> str:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if (fields[1][-5:], fields[2][-5:]) == wanted:
                    return fields[5]
            raise AssertionError("no such connection")

        wait_until(lambda: timer().startswith("02:"), "nobody asks")
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        assert int(timer()[3:], 16) <= 30 * ticks_per_s
        assert running.stop() == 0
