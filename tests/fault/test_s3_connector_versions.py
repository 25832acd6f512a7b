"""S3 servers that change objects under a reader, lie about them, or know less than S3."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import KIB
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.interfaces import Connector
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.s3 import S3Connector
from kvtier_connectors.s3.settings import parse_url
from tests.lib.opened import Opened
from tests.lib.s3_servers import FailingS3, Orders, use_credentials

DATA = payload_of(b"key", 1024)
NEWER = payload_of(b"key", 1024, version=1)
REQUEST = ReadRequest(b"key", 0, len(DATA))
#: A call that is given up does not last as long as a silent store would make it.
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def server() -> Iterator[FailingS3]:
    made = FailingS3()
    yield made
    made.close()


def connected(server: FailingS3, options: str = "", **sizes: Any) -> S3Connector:
    url = f"s3://bucket/p?endpoint={server.endpoint}&region=r&timeout_s={PATIENCE_S}{options}"
    return S3Connector(replace(parse_url(url), **sizes))


@pytest.fixture
def connector(server: FailingS3, opened: Opened) -> Connector:
    return opened(connected(server))


class Store:
    """Answers GETs one after the other, each as its step says; then it goes on like the last."""

    def __init__(self, server: FailingS3, *steps: Callable[[Any, int, int], None]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self._steps = list(steps)
        self._lock = threading.Lock()
        server.get = self.get  # type: ignore[method-assign]

    def get(self, handler: Any) -> None:
        with self._lock:
            self.asked.append((handler.headers["Range"], handler.headers.get("If-Match")))
            step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"])
        assert found
        step(handler, int(found[1]), int(found[2]) + 1)


def part(
    data: bytes, etag: str = '"one"', *, cut: int | None = None, checksum: str = ""
) -> Callable[[Any, int, int], None]:
    """Answer with the range that was asked for, or the first ``cut`` bytes of it and the end."""

    def answer(handler: Any, start: int, stop: int) -> None:
        stop = min(stop, len(data))
        handler.send_response(206)
        handler.send_header("Content-Length", str(stop - start))
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if etag:
            handler.send_header("ETag", etag)
        if checksum:
            handler.send_header("x-amz-checksum-crc32", checksum)
        handler.end_headers()
        handler.wfile.write(data[start:stop][:cut])
        handler.close_connection = True

    return answer


def refused(status: int) -> Callable[[Any, int, int], None]:
    return lambda handler, start, stop: handler.answer(status, b"")


async def test_an_object_replaced_at_a_cut_is_read_anew(
    server: FailingS3, connector: Connector
) -> None:
    store = Store(server, part(DATA, cut=500), refused(412), part(NEWER, '"two"'))
    assert await get_whole(connector, {b"key": len(DATA)}) == [NEWER]
    assert [condition for _, condition in store.asked] == [None, '"one"', None]
    assert [asked for asked, _ in store.asked] == [
        "bytes=0-1023",
        "bytes=500-1023",
        "bytes=0-1023",
    ]


async def test_a_store_that_ignores_if_match_gives_no_mix(
    server: FailingS3, connector: Connector
) -> None:
    Store(server, part(DATA, cut=500), part(NEWER, '"two"'))
    assert await get_whole(connector, {b"key": len(DATA)}) == [NEWER]


@pytest.mark.parametrize("nbytes", [700, 400])
async def test_an_object_made_shorter_at_a_cut_is_no_mix(
    server: FailingS3, connector: Connector, nbytes: int
) -> None:
    Store(server, part(DATA, cut=500), refused(412), part(NEWER[:nbytes], '"two"'))
    assert await get(connector, [REQUEST]) == [(nbytes, NEWER[:nbytes])]


async def test_without_versions_an_answer_is_whole_or_asked_for_anew(
    server: FailingS3, opened: Opened
) -> None:
    connector = opened(connected(server))
    store = Store(server, part(DATA, "", cut=500), part(DATA, ""))
    assert await get_whole(connector, {b"key": len(DATA)}) == [DATA]
    assert [asked for asked, _ in store.asked] == ["bytes=0-1023", "bytes=0-1023"]
    pieces = opened(connected(server, piece_bytes=256))
    ((outcome, _),) = await get(pieces, [REQUEST])
    assert isinstance(outcome, ConnectorDataError)


async def test_b78_the_stores_own_checksum_is_verified_where_it_gives_one(
    server: FailingS3, connector: Connector
) -> None:
    checksum = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
    Store(server, part(DATA, checksum=checksum))
    assert await get_whole(connector, {b"key": len(DATA)}) == [DATA]
    assert await get(connector, [ReadRequest(b"key", 5, 10)]) == [(10, DATA[5:15])]
    flipped = bytes([DATA[0] ^ 1]) + DATA[1:]
    Store(server, part(flipped, checksum=checksum))
    ((outcome, _),) = await get(connector, [REQUEST])
    assert isinstance(outcome, ConnectorDataError)


async def test_a_call_given_up_while_bytes_trickle_ends_at_once(
    server: FailingS3, connector: Connector
) -> None:
    begun = threading.Event()

    def trickle(handler: Any, start: int, stop: int) -> None:
        handler.send_response(206)
        handler.send_header("Content-Length", str(stop - start))
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{stop}")
        handler.send_header("ETag", '"one"')
        handler.end_headers()
        handler.wfile.write(b"x")
        begun.set()
        server.let_go.wait(60)

    store = Store(server, trickle)
    clock, into = SystemClock(), memoryview(bytearray(1024))
    call = asyncio.ensure_future(connector.read([REQUEST], [into]))
    assert await asyncio.to_thread(begun.wait, 60)
    start = clock.now()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert clock.now() - start < PATIENCE_S / 2
    assert len(store.asked) == 1, "what was given up is not asked for again"


async def test_a_call_given_up_while_the_store_is_silent_asks_for_nothing_more(
    server: FailingS3, opened: Opened
) -> None:
    begun = threading.Event()

    def silence(handler: Any, start: int, stop: int) -> None:
        begun.set()
        server.let_go.wait(60)
        handler.close_connection = True

    store = Store(server, silence)
    connector = opened(connected(server))
    call = asyncio.ensure_future(connector.read([REQUEST], [memoryview(bytearray(1024))]))
    assert await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    await asyncio.sleep(0)
    server.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(store.asked) == 1


async def test_a_store_that_knows_no_conditions_stores_all_the_same(
    server: FailingS3, opened: Opened
) -> None:
    connector = opened(connected(server, "&if_absent=yes"))
    server.orders = Orders(knows_conditions=False)
    await put(connector, {b"key": DATA})
    await put(connector, {b"key": NEWER, b"other": DATA})
    assert await get_whole(connector, {b"key": 1024, b"other": 1024}) == [NEWER, DATA]
    assert server.orders.requests.count("PUT") == 4, "it is asked once"


async def test_a_store_that_deletes_only_singly_deletes(
    server: FailingS3, connector: Connector
) -> None:
    keys = [b"key%d" % number for number in range(5)]
    await put(connector, dict.fromkeys(keys, DATA))
    await connector.delete(keys[:4])
    assert await connector.contains(keys) == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("<Contents><Size>1</Size></Contents>", ConnectorDataError),
        ("<Contents><Key>p/x</Key><Size>many</Size></Contents>", ConnectorDataError),
        (
            "<IsTruncated>true</IsTruncated><NextContinuationToken>on</NextContinuationToken>",
            ConnectorDataError,
        ),
        ("</ListBucketResult>no xml", ConnectorUnavailableError),
    ],
)
async def test_nonsense_for_a_listing_is_an_error(
    server: FailingS3, opened: Opened, inside: str, kind: type[ConnectorError]
) -> None:
    answer = f"<ListBucketResult>{inside}</ListBucketResult>".encode()
    server.get = lambda handler: handler.answer(200, answer)  # type: ignore[method-assign]
    connector = opened(connected(server))
    with pytest.raises(kind):
        async for _ in connector.list(b""):
            pass


async def test_a_large_object_whose_upload_has_no_answer_is_an_outcome(
    server: FailingS3, opened: Opened
) -> None:
    connector = opened(connected(server, part_bytes=KIB, multipart_bytes=KIB))
    items = [WriteItem(b"large", memoryview(DATA * 4)), WriteItem(b"small", memoryview(DATA))]
    large, small = await connector.write(items)
    assert large is not None
    assert small is None
