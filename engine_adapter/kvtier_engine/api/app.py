"""The HTTP application: OpenAI's routes, and those for operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kvtier.obs.dashboard.page import dashboard
from kvtier_engine.api.errors import internal_error
from kvtier_engine.api.gate import ApiKeyGate, has_key
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.routes import http_error, openai_routes
from kvtier_engine.api.service import Service
from kvtier_engine.settings import Settings

#: A context that is entered before the first request and left after the last.
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Health:
    """What ``/health`` answers. ``serving`` False: requests are refused, so 503."""

    serving: bool
    report: dict[str, Any]

    @property
    def public(self) -> dict[str, Any]:
        """The report without what is not for everybody: of a tier, its name and state alone.

        Details name paths, hosts and what is wrong with them.
        """
        tiers = [{"name": tier["name"], "state": tier["state"]} for tier in self.report["tiers"]]
        return {**self.report, "tiers": tiers}


def create_app(
    service: Service,
    tokenizer: TokenizerLike,
    model: ServedModel,
    settings: Settings,
    *,
    health: Callable[[], Health],
    stats: Callable[[], dict[str, Any]],
    pins: Callable[[], dict[str, Any]],
    registry: CollectorRegistry,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """Return the application. ``health`` to ``pins`` and the registry's collectors do not block."""
    app = FastAPI(
        title="kvtier-serve",
        version=version("kvtier"),
        lifespan=lifespan,
        # The pages would load scripts from a network that the server may not have.
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _last_resort)
    app.add_middleware(ApiKeyGate, api_key=settings.config.api_key)
    app.include_router(openai_routes(service, tokenizer, model))
    _add_operator_routes(app, settings, health, stats, pins, registry)
    return app


def _add_operator_routes(
    app: FastAPI,
    settings: Settings,
    health: Callable[[], Health],
    stats: Callable[[], dict[str, Any]],
    pins: Callable[[], dict[str, Any]],
    registry: CollectorRegistry,
) -> None:
    @app.get("/health", tags=["operators"])
    async def health_route(request: Request) -> JSONResponse:
        """Tell whether requests are answered, and how the tiers are: in detail, with the key."""
        state = health()
        status = HTTPStatus.OK if state.serving else HTTPStatus.SERVICE_UNAVAILABLE
        known = has_key(request.headers, settings.config.api_key)
        return JSONResponse(state.report if known else state.public, status_code=status)

    @app.get("/v1/kvtier/stats", tags=["operators"])
    async def stats_route() -> JSONResponse:
        """Tell every figure of the tiers, for ``kvtier stat``."""
        return JSONResponse(stats())

    @app.get("/v1/kvtier/pins", tags=["operators"])
    async def pins_route() -> JSONResponse:
        """Tell what is pinned and for how much longer, for ``kvtier pins``."""
        return JSONResponse(pins())

    @app.get("/metrics", tags=["operators"])
    async def metrics_route(request: Request) -> Response:
        """Tell the counters to a scraper, in the format that it asks for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    page = dashboard("v1/kvtier/stats")

    @app.get("/dashboard", tags=["operators"])
    async def dashboard_route() -> HTMLResponse:
        """Show the figures of the tiers to a person; the page asks for the key."""
        return HTMLResponse(page.html, headers=page.headers)

    @app.get("/version", tags=["operators"])
    async def version_route() -> JSONResponse:
        """Tell the version and every setting with its source."""
        return JSONResponse({"version": version("kvtier"), "settings": settings.report()})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = http_error(error.status_code, request.url.path, request.method).response()
    answer.headers.update(error.headers or {})
    return answer


async def _last_resort(request: Request, error: Exception) -> Response:
    """Answer for a fault outside the OpenAI routes; the server logs it with its trace."""
    del error
    return internal_error(request.url.path).response()
