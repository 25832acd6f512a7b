"""The OpenAI endpoints: from a request to an answer, every failure in OpenAI's error form."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvtier_engine.api.calls import Call, check_model
from kvtier_engine.api.chat import chat_call
from kvtier_engine.api.completions import completion_call
from kvtier_engine.api.errors import ApiError, internal_error
from kvtier_engine.api.gate import read_body
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.schemas import ChatBody, CompletionBody
from kvtier_engine.api.service import Service
from kvtier_engine.api.streaming import CLIENT_GONE
from kvtier_engine.api.warm import UnpinBody, WarmBody, unpin_call, warm_call

_log = logging.getLogger(__name__)


class CallBuilder(Protocol):
    """Understands a body."""

    def __call__(
        self, raw: bytes, *, tokenizer: TokenizerLike, model: ServedModel, created: int
    ) -> Awaitable[Call]:
        """Return the call, or raise ``ApiError``."""
        ...


def openai_routes(service: Service, tokenizer: TokenizerLike, model: ServedModel) -> APIRouter:
    """Return ``/v1``."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    async def models() -> JSONResponse:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [_model_object(model)]})

    async def one_model(name: str) -> Response:
        """Describe the model, or answer 404."""
        try:
            check_model(name, model)
        except ApiError as error:
            return error.response()
        return JSONResponse(_model_object(model))

    router.add_api_route("/models", models, methods=["GET"])
    # A name may hold slashes, as those of Hugging Face do.
    router.add_api_route("/models/{name:path}", one_model, methods=["GET"])
    for path, endpoint, build, body in (
        ("/completions", "completions", completion_call, CompletionBody),
        ("/chat/completions", "chat", chat_call, ChatBody),
        ("/kvtier/warm", "warm", warm_call, WarmBody),
        ("/kvtier/unpin", "unpin", unpin_call, UnpinBody),
    ):
        handler = _handler(
            partial(_answer_boundary, endpoint, build, service, tokenizer, model),
        )
        schema = {"content": {"application/json": {"schema": body.model_json_schema()}}}
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            name=endpoint,
            summary=(body.__doc__ or "").strip(),
            openapi_extra={"requestBody": {**schema, "required": True}},
        )
    return router


def _handler(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a plain function for the framework, which reads its signature."""

    async def handler(request: Request) -> Response:
        return await answer(request)

    return handler


async def _answer_boundary(
    endpoint: str,
    build: CallBuilder,
    service: Service,
    tokenizer: TokenizerLike,
    model: ServedModel,
    request: Request,
) -> Response:
    """Answer a request; nothing but a response comes out, and no response tells of internals."""
    try:
        raw = await read_body(request)
        call = await build(raw, tokenizer=tokenizer, model=model, created=int(time.time()))
    except ApiError as error:
        service.refused(endpoint)
        return error.response()
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    # A bug becomes an answer, whose id leads to the log.
    except Exception:
        _log.exception("a request to %s could not be understood", endpoint)
        return internal_error(endpoint).response()
    try:
        return await service.answer(call, request.receive)
    except ApiError as error:
        return error.response()


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvtier",
        "max_model_len": model.context_tokens,
    }


def http_error(status: int, path: str, method: str) -> ApiError:
    """Return the error of a request that met no route."""
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{method} is not allowed on {path}."
        return ApiError(HTTPStatus(status), message, code="method_not_allowed")
    if status == HTTPStatus.NOT_FOUND:
        return ApiError(HTTPStatus(status), f"There is no {path} here.", code="unknown_url")
    return ApiError(HTTPStatus(status), HTTPStatus(status).phrase, code="http_error")
