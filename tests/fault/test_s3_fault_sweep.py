"""SeaweedFS behind a proxy that lets one request after the other go wrong, or all from one on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from kvtier.constants import KIB, MIB
from kvtier.errors import ConnectorError, ConnectorTimeoutError, ConnectorUnavailableError
from kvtier.testing.connector_contract import payload_of
from kvtier.testing.connector_script import Script
from kvtier.testing.stream_proxy import At, Mischief, StreamProxy, Way, stream_proxy
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators.encrypted import Encrypted
from kvtier_connectors.s3 import S3Connector
from kvtier_connectors.s3.settings import parse_url
from tests.lib.fault_proxy import FaultProxy, Plan, Trouble, fault_proxy
from tests.lib.one_key import OneKey
from tests.lib.s3_servers import BUCKET, client, seaweed, url_of, use_credentials

#: S3 takes no smaller parts, so one large object of two of them is enough.
PART_BYTES = 5 * MIB
SIZES = {b"small": 100, b"pieces": 200 * KIB, b"parts": PART_BYTES + 1000}
OBJECTS = {key: payload_of(key, nbytes) for key, nbytes in SIZES.items()}
REQUESTS = [
    ReadRequest(b"small", 0, SIZES[b"small"]),
    ReadRequest(b"pieces", 0, SIZES[b"pieces"]),
    ReadRequest(b"parts", 10, 3 * 64 * KIB),
]
#: Scripts under way at the same time.
TOGETHER = 6
#: Of so many requests one meets each trouble in a run of normal size; a soak sweeps all of them.
STRIDE = 4
#: What a script may take in all, whatever goes wrong: tries, their time-outs and pauses.
SCRIPT_S_MAX = 120.0
#: Silence is told from a busy machine by this; one hanging request costs a script as long.
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as made:
        yield made.endpoint


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


def opened(endpoint: str, timeout_s: float = TIMEOUT_S, tries: int = 3) -> S3Connector:
    """Return a connector to a new place, with pieces small enough that there are many."""
    options = f"&timeout_s={timeout_s}&connections=4&tries={tries}"
    settings = parse_url(url_of(endpoint, uuid.uuid4().hex, options))
    return S3Connector(
        replace(
            settings,
            piece_bytes=64 * KIB,
            part_bytes=PART_BYTES,
            multipart_bytes=PART_BYTES,
        )
    )


async def act(
    endpoint: str, plan: Plan, timeout_s: float = TIMEOUT_S, tries: int = 3
) -> tuple[Script, FaultProxy]:
    script = Script(SIZES, REQUESTS)
    async with fault_proxy(endpoint) as proxy, asyncio.timeout(SCRIPT_S_MAX):
        proxy.plan = plan
        connector = opened(proxy.endpoint, timeout_s, tries)
        try:
            await script.run(connector)
        finally:
            await connector.close()
    return script, proxy


async def in_turns(endpoint: str, plans: Sequence[Plan]) -> list[Script]:
    """Run a script for each plan, a few at a time."""
    room = asyncio.Semaphore(TOGETHER)

    async def one(plan: Plan) -> Script:
        async with room:
            return (await act(endpoint, plan))[0]

    return await asyncio.gather(*(one(plan) for plan in plans))


def once(trouble: Trouble, at: int) -> Plan:
    return lambda number: trouble if number == at else None


def since(trouble: Trouble, at: int) -> Plan:
    return lambda number: trouble if number >= at else None


async def test_b77_whichever_request_goes_wrong_once_nobody_notices(
    endpoint: str, scale: int
) -> None:
    script, proxy = await act(endpoint, lambda number: None)
    script.assert_well()
    assert script.listed == SIZES
    assert proxy.requests > 20
    stride = STRIDE if scale == 1 else 1
    plans = [
        once(trouble, number)
        for offset, trouble in enumerate(Trouble)
        for number in range(1 + offset % stride, proxy.requests + 1, stride)
    ]
    for script in await in_turns(endpoint, plans):
        script.assert_well()
        assert script.listed == SIZES


@pytest.mark.parametrize("trouble", Trouble)
async def test_what_goes_wrong_for_ever_gives_errors_and_never_wrong_bytes(
    endpoint: str, trouble: Trouble
) -> None:
    timeout_s = 0.3 if trouble is Trouble.HANG else TIMEOUT_S
    kinds = (ConnectorUnavailableError, ConnectorTimeoutError)
    script, _ = await act(endpoint, since(trouble, 1), timeout_s, tries=2)
    if trouble is not Trouble.CUT:
        # Answers to HEAD and PUT have no body that could be cut.
        assert all(isinstance(error, kinds) for error in script.written)
        assert script.there == [False] * 4
    assert not any(isinstance(outcome, int) for outcome in script.read)
    assert isinstance(script.listed, ConnectorError)


@pytest.mark.parametrize("mischief", [Mischief.FLIP, Mischief.GARBAGE])
async def test_b78_wherever_a_byte_is_changed_nothing_wrong_is_believed(
    endpoint: str, mischief: Mischief, scale: int
) -> None:
    """A range comes without a checksum: what is changed in it is found by whoever decrypts it."""
    where = urlsplit(endpoint)
    assert where.hostname is not None
    assert where.port is not None
    target = (where.hostname, where.port)

    async def through(fault: At | None) -> StreamProxy:
        async with stream_proxy(target, fault) as proxy, asyncio.timeout(SCRIPT_S_MAX):
            inner = opened(f"http://127.0.0.1:{proxy.port}", timeout_s=1.0, tries=2)
            connector = Encrypted(inner, OneKey(), "tenant")
            script = Script(SIZES, REQUESTS)
            await script.run(connector)
            if fault is None:
                script.assert_well()
            await connector.close()
        return proxy

    passed = (await through(None)).passed
    count = 6 * scale
    for number in range(count):
        for way in Way:
            await through(At(mischief, way, passed[way] * number // count + number))


async def test_it_is_well_again_once_the_store_is(endpoint: str) -> None:
    async with fault_proxy(endpoint) as proxy:
        connector = opened(proxy.endpoint, tries=2)
        for trouble in (Trouble.RESET, Trouble.SLOW_DOWN, Trouble.LOST):
            proxy.plan = since(trouble, 1)
            (written,) = await connector.write([WriteItem(b"small", memoryview(b"data"))])
            assert isinstance(written, ConnectorUnavailableError)
            proxy.plan = lambda number: None
            script = Script(SIZES, REQUESTS)
            await script.run(connector)
            script.assert_well()
            assert script.listed == SIZES
            await connector.delete([*OBJECTS])
        await connector.close()


async def test_an_upload_that_is_given_up_leaves_nothing_behind(endpoint: str) -> None:
    begun, aborted = asyncio.Event(), asyncio.Event()

    def plan(number: int) -> Trouble | None:
        """Begin the upload; hang at its first part; what comes then is the end of it."""
        if number == 2:
            begun.set()
            return Trouble.HANG
        if number > 2:
            aborted.set()
        return None

    data = memoryview(OBJECTS[b"parts"])
    async with fault_proxy(endpoint) as proxy, asyncio.timeout(SCRIPT_S_MAX):
        proxy.plan = plan
        settings = parse_url(url_of(proxy.endpoint, "given-up", "&timeout_s=1&connections=1"))
        settings = replace(settings, part_bytes=PART_BYTES, multipart_bytes=PART_BYTES)
        connector = S3Connector(settings)
        write = asyncio.ensure_future(connector.write([WriteItem(b"parts", data)]))
        await begun.wait()
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        await aborted.wait()
    await connector.close()
    user = client(endpoint)
    assert "Uploads" not in user.list_multipart_uploads(Bucket=BUCKET, Prefix="given-up")
    assert "Contents" not in user.list_objects_v2(Bucket=BUCKET, Prefix="given-up")
    user.close()
