"""A server of the tiny model, put together in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvtier_engine.serve import Server, build
from kvtier_engine.settings import load_settings
from tests.lib.server import LOAD_ALWAYS

#: Two chunks of eight tokens and one token to compute.
SEVENTEEN = list(range(10, 180, 10))


def made(folder: Path, *arguments: str) -> Server:
    """Small blocks, chunks and tiers, unless the arguments say otherwise."""
    small = [f"--model={folder}", "--block-tokens=4", "--chunk-tokens=8", "--kv-bytes=1MiB"]
    tiers = [] if "--no-cache" in arguments else ["--dram=64MiB", LOAD_ALWAYS]
    given = {argument.partition("=")[0] for argument in arguments}
    kept = [each for each in [*small, *tiers] if each.partition("=")[0] not in given]
    return build(load_settings([*kept, *arguments], {}))


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """Serve in this process; give a client."""
    app = server.application()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Complete two tokens of ``SEVENTEEN``, unless the fields say otherwise."""
    body = {"prompt": SEVENTEEN, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
