"""The S3 connector keeps the connector contract, against SeaweedFS."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import kvtier.registry
from kvtier.constants import KIB, MIB
from kvtier.errors import ConnectorRefusedError, ConnectorUnavailableError
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import (
    ConnectorContract,
    ListableContract,
    get,
    get_whole,
    payload_of,
    put,
)
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.s3 import S3Connector
from kvtier_connectors.s3.answers import Piece
from kvtier_connectors.s3.bucket import DELETES_MAX, KEY_BYTES_MAX, Bucket, Upload
from kvtier_connectors.s3.settings import Settings, parse_url
from kvtier_connectors.threads import Halt
from tests.lib.fault_proxy import fault_proxy
from tests.lib.opened import Opened
from tests.lib.s3_servers import BUCKET, CREDENTIALS, client, seaweed, url_of, use_credentials

PIECE_BYTES = Settings("bucket").piece_bytes
MULTIPART_BYTES = Settings("bucket").multipart_bytes
LARGE = 2 * PIECE_BYTES + 123


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as made:
        yield made.endpoint


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def user(endpoint: str) -> Iterator[Any]:
    made = client(endpoint)
    yield made
    made.close()


@pytest.fixture
def url(endpoint: str) -> str:
    """A place in the bucket where nothing is yet."""
    return url_of(endpoint, uuid.uuid4().hex)


class TestS3Connector(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)


async def test_ranges_cross_pieces(url: str, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(url))
    data = payload_of(b"key", LARGE)
    await put(connector, {b"key": data})
    ranges = [(0, LARGE), (PIECE_BYTES - 5, 10), (7, PIECE_BYTES + 100), (LARGE - 1, 1)]
    found = await get(connector, [ReadRequest(b"key", offset, n) for offset, n in ranges])
    assert found == [(n, data[offset : offset + n]) for offset, n in ranges]
    ((outcome, placed),) = await get(connector, [ReadRequest(b"key", 100, 2 * LARGE)])
    assert (outcome, placed) == (LARGE - 100, data[100:])


async def test_a_very_large_object_is_sent_in_parts(url: str, user: Any, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(url))
    data = bytes(range(251)) * (MULTIPART_BYTES // 251 + 1) + b"end"
    await put(connector, {b"key": data})
    assert await get_whole(connector, {b"key": len(data)}) == [data]
    assert "Uploads" not in user.list_multipart_uploads(Bucket=BUCKET)


async def test_b44_what_another_user_deletes_is_a_miss(url: str, user: Any, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(url))
    await put(connector, {b"key": b"data"})
    prefix = url.partition("?")[0].rpartition("/")[2]
    (found,) = user.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    user.delete_object(Bucket=BUCKET, Key=found["Key"])
    assert await get_whole(connector, {b"key": 4}) == [None]
    assert await connector.contains([b"key"]) == [False]
    await put(connector, {b"key": b"newer"})
    assert await get_whole(connector, {b"key": 5}) == [b"newer"]


async def test_if_absent_keeps_what_is_there(endpoint: str, user: Any, opened: Opened) -> None:
    settings = parse_url(url_of(endpoint, uuid.uuid4().hex, "&if_absent=yes"))
    connector = opened(S3Connector(replace(settings, part_bytes=5 * MIB, multipart_bytes=5 * MIB)))
    sizes = {b"small": 5, b"large": 5 * MIB + 7}
    first = {key: payload_of(key, nbytes, 1) for key, nbytes in sizes.items()}
    await put(connector, first)
    await put(connector, {key: payload_of(key, nbytes, 2) for key, nbytes in sizes.items()})
    assert await get_whole(connector, sizes) == list(first.values())
    assert "Uploads" not in user.list_multipart_uploads(Bucket=BUCKET)


async def test_of_two_that_upload_at_the_same_time_the_first_to_end_stays(
    endpoint: str, user: Any
) -> None:
    bucket = Bucket(parse_url(url_of(endpoint, uuid.uuid4().hex, "&if_absent=yes")))
    uploads = [bucket.begin_upload(b"key") for _ in range(2)]
    for number, upload_id in enumerate(uploads):
        assert upload_id is not None
        part = bucket.send_part(Upload(b"key", upload_id, 1, memoryview(b"data%d" % number)))
        bucket.end_upload(b"key", upload_id, [part])
    into = memoryview(bytearray(5))
    assert bucket.read(Piece(b"key", 0, into), Halt())
    assert bytes(into) == b"data0"
    assert "Uploads" not in user.list_multipart_uploads(Bucket=BUCKET)
    bucket.close()


async def test_an_object_swapped_while_it_is_read_in_pieces_is_never_a_mix(
    endpoint: str, user: Any, opened: Opened
) -> None:
    prefix, nbytes = uuid.uuid4().hex, 300 * KIB + 1
    settings = replace(parse_url(url_of(endpoint, prefix)), piece_bytes=32 * KIB)
    connector = opened(S3Connector(settings))
    versions = [payload_of(b"key", nbytes - 1000 * (n % 2), version=n) for n in range(4)]
    await put(connector, {b"key": versions[0]})
    (found,) = user.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    done = threading.Event()

    def swap() -> int:
        swaps = 0
        while not done.is_set():
            swaps += 1
            body = versions[swaps % len(versions)]
            user.put_object(Bucket=BUCKET, Key=found["Key"], Body=body)
        return swaps

    swapping = asyncio.get_running_loop().run_in_executor(None, swap)
    try:
        read = [await get(connector, [ReadRequest(b"key", 0, nbytes)]) for _ in range(30)]
    finally:
        done.set()
        swaps = await swapping
    assert swaps > 3
    for ((outcome, placed),) in read:
        if isinstance(outcome, int):
            assert any(placed == data[:outcome] for data in versions)


async def test_list_by_prefix_passes_over_what_is_not_ours(
    url: str, user: Any, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(url))
    assert isinstance(connector, Listable)
    sizes = {b"a1": 5, b"a2": 0, b"b": 3, b"": 1}
    await put(connector, {key: bytes(nbytes) for key, nbytes in sizes.items()})
    prefix = url.partition("?")[0].rpartition("/")[2]
    user.put_object(Bucket=BUCKET, Key=f"{prefix}/readme.txt", Body=b"other")
    found = [info async for info in connector.list(b"a")]
    assert sorted(found, key=lambda info: info.key) == [KeyInfo(b"a1", 5), KeyInfo(b"a2", 0)]
    assert {info.key: info.nbytes async for info in connector.list(b"")} == sizes


async def test_the_longest_key_fits_and_a_longer_one_is_refused(url: str, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(url))
    longest, longer = b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX + 1)
    items = [WriteItem(key, memoryview(b"data")) for key in (longest, longer)]
    stored, refused = await connector.write(items)
    assert stored is None
    assert isinstance(refused, ConnectorRefusedError)
    assert await get_whole(connector, {longest: 4, longer: 4}) == [b"data", None]
    await connector.delete([longer, longest])
    assert await connector.contains([longest, longer]) == [False, False]


async def test_wrong_credentials_are_a_refusal(
    url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    connector = opened(kvtier.registry.connect(url))
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, ConnectorRefusedError)
    assert "wrong-secret" not in f"{outcome} {outcome.__cause__!r} {connector!r}"
    (written,) = await connector.write([WriteItem(b"key", memoryview(b"data"))])
    assert isinstance(written, ConnectorRefusedError)
    assert await connector.contains([b"key"]) == [False]


async def test_a_missing_bucket_is_a_refusal(endpoint: str, opened: Opened) -> None:
    url = f"s3://no-such-bucket?endpoint={endpoint}&region=us-east-1"
    connector = opened(kvtier.registry.connect(url))
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, ConnectorRefusedError)


async def test_after_close_outcomes_are_errors(url: str) -> None:
    connector = kvtier.registry.connect(url)
    await put(connector, {b"key": b"data"})
    await connector.close()
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, ConnectorUnavailableError)


async def test_objects_spread_over_prefixes_whatever_their_keys_begin_with(
    url: str, user: Any, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(url))
    await put(connector, {b"the same beginning %d" % number: b"x" for number in range(32)})
    place = url.partition("?")[0].rpartition("/")[2]
    found = user.list_objects_v2(Bucket=BUCKET, Prefix=place)["Contents"]
    folders = {each["Key"].removeprefix(place).strip("/").partition("/")[0] for each in found}
    assert len(folders) > 16


async def test_many_keys_are_deleted_by_few_requests_and_no_log_tells_the_secret(
    endpoint: str, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = [b"key%d" % number for number in range(DELETES_MAX + 1)]
    async with fault_proxy(endpoint) as proxy:
        connector = opened(kvtier.registry.connect(url_of(proxy.endpoint, uuid.uuid4().hex)))
        await put(connector, dict.fromkeys(keys[::250], b"x"))
        before = proxy.requests
        await connector.delete(keys)
        assert proxy.requests == before + 2
        assert await connector.contains(keys[::250]) == [False] * len(keys[::250])
        await connector.close()
    assert "DeleteObjects" in caplog.text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text
