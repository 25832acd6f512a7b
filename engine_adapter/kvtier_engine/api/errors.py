"""Errors as OpenAI's clients expect them: one JSON form, a machine-readable code, no internals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

from kvtier_engine.api.limits import RETRY_AFTER_S

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """A request's refusal or failure, ready to be sent.

    ``message`` is for people and holds nothing that the client did not send or may not know;
    ``code`` is for programs; ``param`` names the field at fault.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return Response(
            json.dumps(self.body()),
            status_code=self.status,
            media_type="application/json",
            headers=self.headers,
        )


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return a 400."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """Return the 400 of a field that OpenAI knows and this server does not serve."""
    return bad_request(message, param=param, code="unsupported_parameter")


def context_length_exceeded(prompt_tokens: int, output_tokens: int, limit: int) -> ApiError:
    """Return the 400 of a request that cannot fit; the figures are the request's own."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the prompt, {output_tokens} "
        "for the completion). Please reduce the prompt or max_tokens.",
        param="prompt" if prompt_tokens >= limit else "max_tokens",
        code="context_length_exceeded",
    )


def queue_full() -> ApiError:
    """Return the 429 of a server that has as much to do as it may take on."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        "The queue is full: as many sequences are being served or wait as may. Try again later.",
        code="queue_full",
        kind="rate_limit_error",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def unavailable(message: str, *, code: str) -> ApiError:
    """Return the 503 of a server that will not take this request now."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        code=code,
        kind=SERVER_ERROR,
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def internal_error(call_id: str) -> ApiError:
    """Return the 500 that says nothing but where to look in the log."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"The server failed to answer this request; its log names the cause under {call_id}.",
        code="internal_error",
        kind=SERVER_ERROR,
    )
