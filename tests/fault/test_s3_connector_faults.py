"""An S3 server that fails by order: cut answers, refusals, silence."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from botocore import exceptions as boto_errors

import kvtier.registry
from kvtier.clock import SystemClock
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.s3.connector import READ_TRIES_MAX
from kvtier_connectors.s3.errors import CODES, ERRORS, translated
from kvtier_connectors.s3.settings import Settings, parse_url
from tests.lib.opened import Opened
from tests.lib.program import free_port
from tests.lib.s3_servers import FailingS3, Orders, use_credentials

PIECE_BYTES = Settings("bucket").piece_bytes
DATA = payload_of(b"key", 1024)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def server() -> Iterator[FailingS3]:
    made = FailingS3()
    yield made
    made.close()


@pytest.fixture
async def connector(server: FailingS3) -> AsyncIterator[Connector]:
    made = kvtier.registry.connect(url_of(server))
    yield made
    await made.close()


def url_of(server: FailingS3, options: str = "") -> str:
    return f"s3://bucket/p?endpoint={server.endpoint}&region=r&timeout_s=20{options}"


async def outcome_of(connector: Connector, key: bytes = b"key") -> object:
    ((outcome, data),) = await get(connector, [ReadRequest(key, 0, len(DATA))])
    return data if isinstance(outcome, int) else outcome


async def test_b77_an_answer_that_ends_early_is_gone_on_with(
    server: FailingS3, connector: Connector
) -> None:
    await put(connector, {b"key": DATA})
    server.orders = Orders(cut_at=[512, 100])
    assert await outcome_of(connector) == DATA
    ranges = [line for line in server.orders.requests if line.startswith("GET")]
    assert ranges == ["GET bytes=0-1023", "GET bytes=512-1023", "GET bytes=612-1023"]


async def test_b77_answers_that_always_end_early_are_an_error_after_a_few_tries(
    server: FailingS3, connector: Connector
) -> None:
    await put(connector, {b"key": DATA})
    server.orders = Orders(cut_at=[10] * 100)
    assert isinstance(await outcome_of(connector), ConnectorUnavailableError)
    assert sum(line.startswith("GET") for line in server.orders.requests) <= 3


def page_of(key: bytes, nbytes: int, token: str) -> str:
    return (
        f"<ListBucketResult><IsTruncated>{'true' if token else 'false'}</IsTruncated>"
        f"<NextContinuationToken>{token}</NextContinuationToken><Contents>"
        f"<Key>p/00/{key.hex()}.kv</Key><Size>{nbytes}</Size></Contents></ListBucketResult>"
    )


async def test_a_listing_goes_on_page_by_page_and_tells_of_a_fault(
    server: FailingS3, connector: Connector
) -> None:
    assert isinstance(connector, Listable)
    server.orders = Orders(pages=[page_of(b"a1", 3, "more"), page_of(b"a2", 4, "")])
    found = [info async for info in connector.list(b"a")]
    assert found == [KeyInfo(b"a1", 3), KeyInfo(b"a2", 4)]
    assert "continuation-token=more" in server.orders.requests[1]
    server.orders = Orders(pages=[page_of(b"a1", 3, "more")])
    with pytest.raises(ConnectorRefusedError):
        _ = [info async for info in connector.list(b"a")]


async def test_pieces_of_two_versions_are_read_again_and_never_mixed(
    server: FailingS3, connector: Connector
) -> None:
    data = payload_of(b"key", PIECE_BYTES + 100)
    await put(connector, {b"key": data})
    server.orders = Orders(etags=['"old"', '"new"'])
    assert await get_whole(connector, {b"key": len(data)}) == [data]
    assert len(server.orders.requests) == 4
    server.orders = Orders(etags=['"old"', '"new"'] * 10)
    assert await get_whole(connector, {b"key": len(data)}) == [None]
    assert len(server.orders.requests) == 2 * READ_TRIES_MAX


@pytest.mark.parametrize(
    ("status", "kind", "tries"),
    [
        (403, ConnectorRefusedError, 1),
        (400, ConnectorRefusedError, 1),
        (500, ConnectorUnavailableError, 3),
        (503, ConnectorUnavailableError, 3),
    ],
)
async def test_what_may_pass_is_tried_again_and_what_may_not_is_not(
    server: FailingS3, connector: Connector, status: int, kind: type, tries: int
) -> None:
    await put(connector, {b"key": DATA})
    server.orders = Orders(statuses=[status] * 10)
    assert type(await outcome_of(connector)) is kind
    assert len(server.orders.requests) == tries
    server.orders = Orders(statuses=[status] * (tries - 1))
    assert await outcome_of(connector) == DATA


async def test_a_refused_write_is_its_outcome(server: FailingS3, connector: Connector) -> None:
    server.orders = Orders(put_status=403)
    (outcome,) = await connector.write([WriteItem(b"key", memoryview(DATA))])
    assert isinstance(outcome, ConnectorRefusedError)
    assert isinstance(outcome.__cause__, boto_errors.ClientError)
    server.orders = Orders(put_status=507)
    (outcome,) = await connector.write([WriteItem(b"key", memoryview(DATA))])
    assert isinstance(outcome, ConnectorRefusedError)
    assert await outcome_of(connector) is None


async def test_b111_one_read_that_hangs_holds_up_no_other(
    server: FailingS3, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"s3://bucket/p?endpoint={server.endpoint}&region=r&timeout_s=3&tries=1"
    connector = opened(kvtier.registry.connect(place))
    keys = [b"key%d" % number for number in range(32)]
    await put(connector, dict.fromkeys(keys, DATA))
    server.orders = Orders(hang_on=f"{keys[7].hex()}.kv")
    clock = SystemClock()
    start = clock.now()
    with caplog.at_level(logging.WARNING):
        reads = [asyncio.ensure_future(outcome_of(connector, key)) for key in keys]
        hung = reads.pop(7)
        assert await asyncio.gather(*reads) == [DATA] * 31
        assert isinstance(await hung, ConnectorTimeoutError)
    assert clock.now() - start < 30
    assert not caplog.records, "the pool of connections is as large as that of threads"


async def test_a_server_that_ignores_ranges_gives_no_wrong_bytes(
    server: FailingS3, connector: Connector
) -> None:
    await put(connector, {b"key": DATA})

    def whole(handler: object) -> None:
        handler.answer(200, DATA)  # type: ignore[attr-defined]

    server.get = whole  # type: ignore[method-assign]
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 100, 10)])
    assert isinstance(outcome, ConnectorDataError)
    assert await get_whole(connector, {b"key": len(DATA)}) == [DATA]


async def test_nobody_at_the_address_is_unavailable(opened: Opened) -> None:
    place = f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}&region=r&tries=1"
    connector = opened(kvtier.registry.connect(place))
    assert isinstance(await outcome_of(connector), ConnectorUnavailableError)
    assert await connector.contains([b"key"]) == [False]
    await connector.delete([b"key"])
    with pytest.raises(ConnectorUnavailableError):
        async for _ in connector.list(b""):  # type: ignore[attr-defined]
            pass


async def test_no_credentials_are_a_refusal(
    server: FailingS3, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    connector = opened(kvtier.registry.connect(url_of(server)))
    assert isinstance(await outcome_of(connector), ConnectorRefusedError)
    profile = opened(kvtier.registry.connect(url_of(server, "&profile=nobody")))
    assert isinstance(await outcome_of(profile), ConnectorRefusedError)


def test_every_error_of_the_driver_has_an_outcome() -> None:
    kinds = [kind for _, kind in inspect.getmembers(boto_errors, inspect.isclass)]
    ours = [kind for kind in kinds if issubclass(kind, boto_errors.BotoCoreError)]
    assert len(ours) > 50
    errors: list[Any] = [kind.__new__(kind) for kind in ours]
    assert all(isinstance(translated(error), ConnectorError) for error in errors)
    assert all(issubclass(kind, ConnectorError) for kind in [*ERRORS.values(), *CODES.values()])


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SlowDown", 503, ConnectorUnavailableError),
        ("AccessDenied", 403, ConnectorRefusedError),
        ("BadDigest", 400, ConnectorDataError),
        ("RequestTimeout", 400, ConnectorTimeoutError),
        ("InternalError", 500, ConnectorUnavailableError),
        ("Unheard", 418, ConnectorRefusedError),
        ("", 0, ConnectorUnavailableError),
    ],
)
def test_codes_of_s3_have_their_outcomes(code: str, status: int, kind: type) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert type(translated(boto_errors.ClientError(answer, "GetObject"))) is kind


def test_a_url_may_say_everything() -> None:
    settings = parse_url(
        "s3://bucket/a/b%20c/?endpoint=https://store:1&region=r&profile=p&path_style=no"
        "&if_absent=yes&connections=3&tries=2&timeout_s=0.5&connect_timeout_s=1"
    )
    assert (settings.bucket, settings.prefix) == ("bucket", "a/b c/")
    assert (settings.endpoint, settings.region, settings.profile) == ("https://store:1", "r", "p")
    assert (settings.path_style, settings.if_absent) == (False, True)
    assert (settings.connections, settings.tries) == (3, 2)
    assert (settings.timeout_s, settings.connect_timeout_s) == (0.5, 1.0)
    assert parse_url("s3://bucket?endpoint=http://store").path_style
    assert not parse_url("s3://bucket").path_style


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket?regoin=x", r"no 'regoin' \(did you mean 'region'\?\)"),
        ("s3://key:hush@bucket", "credentials do not belong"),
        ("s3://", "names a bucket"),
        ("s3://bucket?endpoint=store:9000", "begins with http"),
        ("s3://bucket?path_style=yse", r"did you mean 'yes'"),
        ("s3://bucket?tries=0", "tries of an s3:// URL is '0'; allowed is 1 to 10"),
        ("s3://bucket?connections=many", "connections"),
        ("s3://bucket?connections=2.5", "allowed: a whole number"),
        ("s3://bucket?endpoint=http://key:hush@store", "do not belong into the endpoint"),
        ("s3://bucket?secret_key=hush", "no 'secret_key'"),
    ],
)
def test_a_bad_url_is_a_config_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        kvtier.registry.connect(url)
    assert "hush" not in str(caught.value)
