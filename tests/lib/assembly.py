"""The whole server in this process, with the bundled model, on a test's own file system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import httpx
import pytest

from kvtier.cache.cache import Cache
from kvtier.tiers.disk.files import FileSystem
from kvtier_engine import serve
from kvtier_engine.settings import load_settings
from kvtier_engine.weights.load import load_model
from tests.lib.reference import token_ids
from tests.lib.server import POLL_S, STATE_TIMEOUT_S, Answer, Metrics, read_metrics


class Assembled:
    """A server that has started, reached without a socket."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Return the greedy completion of exactly ``max_tokens`` tokens."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
        response = await self._client.post("/v1/completions", json={**body, "ignore_eos": True})
        assert response.status_code == httpx.codes.OK, response.text
        (choice,), usage = response.json()["choices"], response.json()["usage"]
        return Answer(
            tuple(prompt),
            token_ids(choice["logprobs"]["tokens"]),
            choice["text"],
            finish=choice["finish_reason"],
            cached=usage["prompt_tokens_details"]["kvtier"],
        )

    async def disk(self) -> dict[str, Any]:
        """What ``/health`` says of the disk tier."""
        report = (await self._client.get("/health")).json()
        (disk,) = (tier for tier in report["tiers"] if tier["name"] == "disk")
        return dict(disk)

    async def wait_for_disk(self, state: str) -> dict[str, Any]:
        """Look until the disk tier is in this state, and return what it says."""
        async with asyncio.timeout(STATE_TIMEOUT_S):
            # No event tells of what other threads do.
            while (disk := await self.disk())["state"] != state:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return disk

    async def wait_until(self, reached: Callable[[Metrics], bool]) -> Metrics:
        """Look at the metrics until they are as wanted, and return them."""
        async with asyncio.timeout(STATE_TIMEOUT_S):
            while not reached(metrics := await self.metrics()):  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)
        return metrics

    async def metrics(self) -> Metrics:
        """Every series by its name with labels, as scraped."""
        return read_metrics((await self._client.get("/metrics")).text)


@cache
def _load_once(*arguments: Any, **options: Any) -> Any:
    return load_model(*arguments, **options)


@asynccontextmanager
async def assembled(*options: str, files: FileSystem | None = None) -> AsyncIterator[Assembled]:
    """Build and start a server; it is closed after. The model is loaded once for all of them.

    ``files`` stands in for the operating system's file system below the disk tier.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "load_model", _load_once)
        if files is not None:
            patch.setattr(serve, "Cache", partial(Cache, files=files))
        server = serve.build(load_settings(options, {}))
    app = server.application()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield Assembled(client)
