"""The control plane: HTTP for operators. It carries no payload."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import generate_latest

from kvtier.obs.dashboard.history import History
from kvtier.obs.prometheus import registry_of
from kvtier_server.credentials import Tokens
from kvtier_server.dashboard import add_dashboard
from kvtier_server.figures import SERIES, Snapshot, health_of, stats_of


def create_app(
    snapshot: Callable[[], Snapshot],
    config: dict[str, Any],
    tokens: Tokens | None,
    history: History,
) -> FastAPI:
    """Return the application. ``snapshot`` does not block; ``config`` holds no secret.

    With tokens, what is below ``/v1`` wants one of them, as a bearer.
    """
    app = FastAPI(
        title="kvtier daemon",
        version=version("kvtier"),
        # The pages would load scripts from a network that the server may not have.
        docs_url=None,
        redoc_url=None,
    )
    registry = registry_of(snapshot, SERIES)

    def allowed(authorization: Annotated[str, Header()] = "") -> None:
        scheme, _, token = authorization.partition(" ")
        if tokens is None:
            return
        if scheme.lower() != "bearer" or tokens.name_of(token.encode()) is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "a token of --token-file is needed", challenge)

    known = [Depends(allowed)]
    add_dashboard(app, history, known)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """How the server and its tiers are doing."""
        return health_of(snapshot())

    @app.get("/ready", responses={503: {"description": "It stops, or its disk is being opened."}})
    async def ready() -> JSONResponse:
        """Whether to send clients here: 200 or 503."""
        now = snapshot()
        opening = any(tier.state == "opening" for tier in now.cache.tiers)
        is_ready = not (now.draining or opening)
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Everything that is counted, for Prometheus."""
        return PlainTextResponse(generate_latest(registry).decode())

    @app.get("/v1/stats", dependencies=known)
    @app.get("/v1/kvtier/stats", dependencies=known, include_in_schema=False)
    async def stats() -> dict[str, Any]:
        """Everything that is counted, as ``kvtier stat`` reads it."""
        return stats_of(snapshot())

    @app.get("/v1/config", dependencies=known)
    async def shown_config() -> dict[str, Any]:
        """What the server was told; secrets are masked."""
        return config

    return app
