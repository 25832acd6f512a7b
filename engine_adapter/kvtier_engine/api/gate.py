"""What stands before every route: the API key, and the bound on a body's size."""

from __future__ import annotations

import hmac
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier_engine.api.errors import ApiError
from kvtier_engine.api.limits import BODY_BYTES_MAX

#: Routes that probes, scrapers and browsers reach without a key; they name no prompt, tenant or
#: setting, no path and no host. The dashboard is a page without figures, which asks for the key.
OPEN_PATHS = frozenset({"/health", "/metrics", "/dashboard"})


class ApiKeyGate:
    """ASGI middleware that lets only requests with the key through. No key: everything passes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            if not has_key(headers, self._key):
                missing = not headers.get("authorization", "")
                await _unauthorized(missing=missing).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def has_key(headers: Headers, api_key: str) -> bool:
    """Tell whether a request brings the key; where there is none, every request does."""
    # The scheme's case does not matter (RFC 9110, section 11.1); the key's does.
    scheme, _, given = headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    return not api_key or (scheme.lower() == "bearer" and right)


def _unauthorized(*, missing: bool) -> ApiError:
    what = "No API key was sent" if missing else "The API key is wrong"
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        f"{what}; send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


async def read_body(request: Request) -> bytes:
    """Return the request's body, or raise the 413 before more than the limit has been kept."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        raise _too_large()
    chunks = []
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > BODY_BYTES_MAX:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than {BODY_BYTES_MAX} bytes.",
        code="request_too_large",
        # What is left of the body is not read; the connection cannot carry another request.
        headers={"connection": "close"},
    )
