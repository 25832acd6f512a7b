"""Several cache servers by one URL: each has its share, and one that dies costs its own alone."""

from __future__ import annotations

from contextlib import ExitStack

from kvtier.errors import ConnectorUnavailableError
from kvtier.registry import connect
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest
from tests.lib.daemon import daemon

SIZES = {b"key%d" % number: 100_000 + number for number in range(40)}
REQUESTS = [ReadRequest(key, 0, nbytes) for key, nbytes in SIZES.items()]


async def test_one_of_two_servers_is_killed_and_comes_back() -> None:
    objects = {key: payload_of(key, nbytes) for key, nbytes in SIZES.items()}
    with ExitStack() as undo:
        first, second = (undo.enter_context(daemon()) for _ in range(2))
        places = [each.urls[0].removeprefix("kvtier://") for each in (first, second)]
        connector = connect(f"sharded+kvtier://{','.join(places)}")
        await put(connector, objects)
        assert await get_whole(connector, SIZES) == [*objects.values()]
        shares = [each.connections()["writes"] for each in (first, second)]
        assert sum(shares) == len(objects)
        assert all(shares), "one of them has nothing"

        second.process.kill()
        second.process.wait()
        found = await get(connector, REQUESTS)
        lost = [outcome for outcome, _ in found if isinstance(outcome, ConnectorUnavailableError)]
        assert len(lost) == shares[1]
        whole = {key: data for key, (_, data) in zip(objects, found, strict=True) if data}
        assert len(whole) == shares[0]
        assert whole.items() <= objects.items(), "wrong bytes"

        undo.enter_context(daemon(listen=[places[1]]))
        await put(connector, objects)
        assert await get_whole(connector, SIZES) == [*objects.values()]
        await connector.close()
