"""The dashboard of the server: its page, and the figures of the last while that it begins with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.params import Depends
from fastapi.responses import HTMLResponse

from kvtier.constants import HISTORY_STEP_S
from kvtier.obs.dashboard.history import History
from kvtier.obs.dashboard.page import dashboard
from kvtier_server.routes import refusals


def add_dashboard(app: FastAPI, history: History, allowed: Sequence[Depends]) -> None:
    """Serve the page to everybody, as it holds nothing, and the history to who is allowed."""
    page = dashboard("v1/stats", "v1/history", "v1/namespaces")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show() -> HTMLResponse:
        """The dashboard."""
        return HTMLResponse(page.html, headers=page.headers)

    @app.get("/v1/history", dependencies=allowed, responses=refusals(401))
    async def samples() -> dict[str, Any]:
        """What the figures were in the last quarter of an hour, for the dashboard."""
        return history.told()


@contextlib.asynccontextmanager
async def recorded(history: History, stats: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
    """Note the figures now and every ``HISTORY_STEP_S`` meanwhile. ``stats`` does not block."""
    noting = asyncio.get_running_loop().create_task(_note(history, stats))
    try:
        yield
    finally:
        noting.cancel()
        await asyncio.wait({noting})


async def _note(history: History, stats: Callable[[], dict[str, Any]]) -> None:
    while True:
        history.note(stats())
        await asyncio.sleep(HISTORY_STEP_S)
