"""The API over a scripted engine, reached in-process, as clients reach it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from kvtier.clock import SystemClock
from kvtier_engine.api.admission import Admission
from kvtier_engine.api.app import Health, create_app
from kvtier_engine.api.held import Held
from kvtier_engine.api.ports import Generator, ServedModel, TokenizerLike
from kvtier_engine.api.service import Service
from kvtier_engine.settings import load_settings
from tests.lib.api_fakes import VOCAB, ByteTokenizer, ScriptedEngine

MODEL = "toy"
#: How ``/health`` tells of a remote that does not answer.
REMOTE = {"name": "remote", "state": "unreachable", "detail": "no answer of kv.internal:6379"}


@dataclass
class Api:
    """One application. ``context`` is the model's limit in tokens."""

    engine: Generator = field(default_factory=ScriptedEngine)
    context: int = 4096
    sequences_max: int = 64
    api_key: str = ""
    tokenizer: TokenizerLike = field(default_factory=ByteTokenizer)
    held: Held | None = None
    admission: Admission = field(init=False)
    service: Service = field(init=False)
    app: FastAPI = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.sequences_max)
        self.service = Service(self.engine, self.admission, SystemClock(), self.held)
        self.app = create_app(
            self.service,
            self.tokenizer,
            ServedModel(MODEL, self.context, VOCAB, "f" * 64, 1_700_000_000),
            load_settings([], {"KVTIER_API_KEY": self.api_key} if self.api_key else {}),
            health=lambda: Health(serving=True, report={"status": "ok", "tiers": [REMOTE]}),
            stats=dict,
            pins=dict,
            registry=CollectorRegistry(),
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Post a body: bytes as they are, anything else as JSON, NaN and all."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, headers=headers)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a complete stream, without its end mark."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, whose form is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert error["message"]
    return error


@dataclass
class RawCall:
    """A request spoken in ASGI, whose client can hang up at any moment."""

    app: FastAPI
    path: str
    body: Mapping[str, Any] | None
    sent: list[dict[str, Any]] = field(default_factory=list)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def sent_text(self, text: bytes) -> None:
        """Wait until the answer holds a text."""
        async with self.grown:
            await self.grown.wait_for(lambda: text in self.answer)

    @property
    def answer(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        body = iter([] if self.body is None else [json.dumps(self.body).encode()])

        async def receive() -> dict[str, Any]:
            for content in body:
                return {"type": "http.request", "body": content, "more_body": False}
            await self.hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            async with self.grown:
                self.sent.append(message)
                self.grown.notify_all()

        await self.app(scope, receive, send)
