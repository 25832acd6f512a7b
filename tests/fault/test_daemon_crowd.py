"""Clients of a cache server that leave in the middle, all at once, or ask for ever."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvtier.constants import GIB, MIB, WIRE_STALL_S_MAX
from kvtier.registry import connect
from kvtier.testing.connector_contract import get_whole, put
from kvtier.testing.engine_double import wait_until
from kvtier.wire import Area, Contains, Done, Found, Lease, Leased, Map, Read, Status, Take, Write
from tests.lib.certificates import make_authority
from tests.lib.daemon import PROGRAM, daemon
from tests.lib.wire_client import WireClient
from tests.lib.wire_corpus import CORPUS

MINE, YOURS = b"what stays" * 9000, b"what breaks off" * 6000
#: A request and a look at the server's health, on a machine that has other things to do.
SLOWEST_S_MAX = WIRE_STALL_S_MAX / 2


def asked(client: WireClient, message: Read) -> tuple[Status, bytes]:
    client.send(message)
    answer, data = client.read_answer()
    return answer.status, data


def stored(client: WireClient, key: bytes, data: bytes) -> None:
    client.send(Write(9, key), data)
    assert client.answer() == Done(9, Status.OK, "")


@pytest.mark.parametrize("way", ["write", "take"])
def test_b65_a_key_whose_writer_died_is_missing_and_can_be_written(
    tmp_path: Path, way: str
) -> None:
    """Killed half-way through an upload: nobody sees a part of it, and nobody waits for it."""
    with daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running:
        with closing(WireClient(running.urls[0]).hello(version=2)) as other:
            with closing(WireClient(running.urls[0]).hello(version=2)) as dying:
                if way == "write":
                    dying.send(Write(1, b"key"), YOURS[:1000], announced=len(YOURS))
                    wait_until(
                        lambda: running.get("/v1/stats")["cache"]["stores_inflight"] == 1,
                        "the upload has not begun",
                    )
                else:
                    mapped, descriptors = dying.map(Area.STAGING)
                    dying.send(Take(1, b"key", mapped.region, 0, mapped.nbytes))
                    for each in descriptors:
                        os.close(each)
                reset = struct.pack("ii", 1, 0)
                dying.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            wait_until(lambda: running.connections()["open"] == 1, "it is still there")
            status, data = asked(other, Read(2, b"key", 0, len(YOURS)))
            # What was staged may have been whole by then.
            assert status is Status.ABSENT or (way == "take" and data == bytes(len(YOURS)))
            begun_s = time.monotonic()
            stored(other, b"key", MINE)
            assert time.monotonic() - begun_s < SLOWEST_S_MAX
            assert asked(other, Read(3, b"key", 0, len(MINE))) == (Status.OK, MINE)
        assert running.stop() == 0


def test_b40_asking_whether_it_is_there_keeps_nothing_from_leaving(tmp_path: Path) -> None:
    """All that is there is asked for all the time; what is new finds room at once."""
    with daemon("--dram=64MiB") as running:
        with (
            closing(WireClient(running.urls[0]).hello()) as asking,
            closing(WireClient(running.urls[0]).hello()) as storing,
        ):
            keys = tuple(b"object %d" % number for number in range(120))
            for number, key in enumerate(keys):
                asking.send(Contains(number, keys[: number + 1]))
                stored(storing, key, bytes([number]) * MIB)
                assert isinstance(asking.answer(), Found)
            asking.send(Contains(0, keys))
            answer = asking.answer()
            assert isinstance(answer, Found)
            assert answer.found[-1]
            assert not answer.found[0]
            assert 20 < sum(answer.found) < 64
        assert running.stop() == 0


def test_b55_clients_that_go_all_at_once_hold_up_nobody(tmp_path: Path) -> None:
    """Each with all the leases that it may have, and an upload half done."""
    with daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running:
        with closing(WireClient(running.urls[0]).hello(version=2)) as good:
            stored(good, b"small", b"x" * 1000)
            crowd = [WireClient(running.urls[0]).hello(version=2) for _ in range(40)]
            for client in crowd:
                for number in range(256):
                    client.send(Lease(number, b"small"))
                for _ in range(256):
                    answer = client.answer()
                    assert isinstance(answer, Leased)
                    assert answer.status is Status.OK
                client.send(Write(300, b"half"), b"x" * 100, announced=200)
            for client in crowd:
                client.close()
            slowest_s, gone = 0.0, False
            while not gone:
                begun_s = time.monotonic()
                assert running.get("/health")["status"] == "ok"
                stored(good, b"meanwhile", MINE)
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
                gone = running.connections()["open"] == 1
            assert slowest_s < SLOWEST_S_MAX
            assert running.connections()["lost_leases"] == 40 * 256
            pinned = [tier["pinned_chunks"] for tier in running.get("/v1/stats")["tiers"]]
            assert not any(pinned)
        assert running.stop() == 0


async def test_b118_whatever_is_sent_where_tls_is_spoken_ends_there(tmp_path: Path) -> None:
    """Frames, requests of other protocols, halves of handshakes; and who knocks and goes."""
    made = make_authority(tmp_path / "authority")
    options = (f"--tls-cert={made.server_cert}", f"--tls-key={made.server_key}")
    with daemon(*options, "--dram=64MiB", "--log-level=debug") as running:
        plain = running.urls[0].replace("kvtiers", "kvtier")
        for number, data in enumerate([b"", *CORPUS]):
            with closing(WireClient(plain)) as client:
                with suppress(ConnectionError):
                    client.socket.sendall(data)
                if number % 2:
                    reset = struct.pack("ii", 1, 0)
                    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connector = connect(f"{running.urls[0]}?ca={made.ca}&timeout_s=20&connect_timeout_s=20")
        await put(connector, {b"key": MINE})
        assert await get_whole(connector, {b"key": len(MINE)}) == [MINE]
        await connector.close()
        await asyncio.to_thread(
            wait_until, lambda: running.connections()["open"] == 0, "somebody is still there"
        )
        assert running.stop() == 0


def test_b58_clients_that_ask_for_all_and_take_nothing_hold_up_nobody(tmp_path: Path) -> None:
    """Each announces more than there is, of an object that it never takes off the wire."""
    with daemon("--dram=64MiB") as running:
        with closing(WireClient(running.urls[0]).hello()) as good:
            stored(good, b"large", bytes(8 * MIB))
            greedy = [WireClient(running.urls[0], receive_bytes=4096).hello() for _ in range(6)]
            for client in greedy:
                for number in range(3):
                    client.send(Read(number, b"large", 0, 512 * MIB - 1))
            wait_until(lambda: running.connections()["inflight_bytes"] > GIB, "they do not ask")
            for number in range(20):
                begun_s = time.monotonic()
                stored(good, b"small", MINE)
                assert asked(good, Read(number, b"small", 0, len(MINE))) == (Status.OK, MINE)
                assert time.monotonic() - begun_s < SLOWEST_S_MAX
            assert running.connections()["inflight_bytes"] > GIB, "they were not there any more"
            for client in greedy:
                client.close()
        assert running.stop() == 0


#: The program with few descriptors, of which it needs some thirty itself.
FEW = ("sh", "-c", 'ulimit -n 56; exec "$0" "$@"', PROGRAM)


def test_a_server_without_descriptors_serves_whom_it_has_and_goes_on(tmp_path: Path) -> None:
    """Whoever connects waits; who asks for one more is refused; nobody else notices."""
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    with daemon("--dram=64MiB", listen=listen, program=FEW) as running:
        with closing(WireClient(running.urls[1]).hello(version=2)) as kept:
            stored(kept, b"key", MINE)
            greedy = WireClient(running.urls[1]).hello(version=2)
            crowd = [WireClient(running.urls[0]) for _ in range(80)]
            for number in range(20):
                stored(kept, b"key", MINE)
                assert asked(kept, Read(number, b"key", 0, len(MINE))) == (Status.OK, MINE)
            mapped, descriptors = kept.map(Area.STAGING)
            assert (mapped.status, descriptors) == (Status.REFUSED, [])
            greedy.send(Lease(1, b"key"))
            assert isinstance(greedy.answer(), Leased)
            greedy.send(Map(2, Area.OBJECTS))
            assert greedy.take() is None
            greedy.close()
            for client in crowd:
                client.close()
            with closing(WireClient(running.urls[0]).hello()) as later:
                assert asked(later, Read(1, b"key", 0, len(MINE))) == (Status.OK, MINE)
            wait_until(lambda: running.connections()["open"] == 1, "somebody is still there")
            mapped, descriptors = kept.map(Area.STAGING)
            assert mapped.status is Status.OK
            for each in descriptors:
                os.close(each)
        assert running.stop() == 0
