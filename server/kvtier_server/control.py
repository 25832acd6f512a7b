"""The control plane: HTTP for operators. It carries no payload."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.constants import CONTROL_BODY_BYTES_MAX
from kvtier.obs.dashboard.history import History
from kvtier.obs.prometheus import registry_of
from kvtier_server.dashboard import add_dashboard
from kvtier_server.figures import SERIES, health_of
from kvtier_server.gate import Control, UnknownCredentialError, known
from kvtier_server.messages import Fault, Ready, Refusal
from kvtier_server.object_routes import object_routes
from kvtier_server.routes import server_routes

_TEXT_MAX: Final = 1000
_FAULTS_MAX: Final = 3


def create_app(control: Control, history: History) -> FastAPI:
    """Return the application.

    What is below ``/v1`` wants a token where there are tokens; see ``caller_of`` for who may what.
    """
    app = FastAPI(
        title="kvtier daemon",
        version=version("kvtier"),
        # The pages would load scripts from a network that the server may not have.
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _refused, RequestValidationError: _invalid},
    )
    app.state.control = control
    app.add_middleware(_BodyLimit)
    add_dashboard(app, history, [Depends(known)])
    _add_health(app, control)
    app.include_router(server_routes)
    app.include_router(object_routes)
    return app


def _add_health(app: FastAPI, control: Control) -> None:
    registry = registry_of(control.snapshot, SERIES)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """How the server and its tiers are doing."""
        return health_of(control.snapshot())

    not_ready = {"description": "It stops, or its disk is being opened.", "model": Ready}

    @app.get("/ready", response_model=Ready, responses={503: not_ready})
    async def ready() -> JSONResponse:
        """Whether to send clients here: 200 or 503."""
        now = control.snapshot()
        opening = any(tier.state == "opening" for tier in now.cache.tiers)
        is_ready = not (now.draining or opening)
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Everything that is counted, for Prometheus."""
        return PlainTextResponse(generate_latest(registry).decode())


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "it is called for these alone"
    word = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    if isinstance(error, UnknownCredentialError):  # What is not found otherwise is a path.
        word = "unknown_credential"
    return _refusal(error.status_code, word, str(error.detail), error.headers)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "it is called for these alone"
    faults = [
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        for fault in error.errors()[:_FAULTS_MAX]
    ]
    return _refusal(422, "invalid", "; ".join(faults))


def _refusal(
    status: int, word: str, text: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    # What was sent may come back in a message, and need not be text that can be sent.
    shown = text[:_TEXT_MAX].encode(errors="replace").decode()
    content = Refusal(error=Fault(type=word, message=shown)).model_dump()
    return JSONResponse(content, status, headers)


class _BodyLimit:
    """Lets a request hold so much, counted while it arrives."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > CONTROL_BODY_BYTES_MAX:
                raise HTTPException(413, f"allowed are {CONTROL_BODY_BYTES_MAX} bytes of body")
            return message

        await self._app(scope, counted, send)
