"""Before and around the routes: key, body size, unknown routes, queue, failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from kvtier_engine.api import limits
from kvtier_engine.api.routes import http_error
from kvtier_engine.api.service import Outcome
from kvtier_engine.types import Delta, FinishReason, GenerateRequest, Usage
from tests.lib.api_fakes import ScriptedEngine, Step
from tests.lib.api_harness import MODEL, REMOTE, Api, error_of, events

ROUTES = ["/v1/models", "/v1/completions", "/version", "/openapi.json", "/nowhere", "/health/x"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer sesam", "sesame", "Basic sesame"])
async def test_a_wrong_or_missing_key_is_a_401(path: str, key: str) -> None:
    headers = {"authorization": key} if key else {}
    response = await Api(api_key="sesame").get(path, **headers)
    error = error_of(response, 401)
    assert error["code"] == "invalid_api_key"
    assert "sesam" not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


async def test_the_right_key_opens_and_probes_need_none() -> None:
    api = Api(api_key="sesame")
    for right in ("Bearer sesame", "bearer sesame"):
        assert (await api.get("/v1/models", authorization=right)).status_code == 200
    for path in ("/health", "/metrics", "/dashboard"):
        assert (await api.get(path)).status_code == 200


async def test_health_names_no_host_to_who_has_no_key() -> None:
    api = Api(api_key="sesame")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        told = await api.get("/health", **headers)
        assert told.status_code == 200
        assert told.json()["tiers"] == [{"name": "remote", "state": "unreachable"}]
        assert "kv.internal" not in told.text
    told = await api.get("/health", authorization="Bearer sesame")
    assert told.json()["tiers"] == [REMOTE]
    assert (await Api().get("/health")).json()["tiers"] == [REMOTE], "nobody has set a key"


async def test_without_a_key_any_authorization_is_ignored() -> None:
    assert (await Api().get("/v1/models", authorization="Bearer x")).status_code == 200


async def test_models_are_listed_and_found_by_name() -> None:
    api = Api()
    listed = (await api.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [MODEL]
    one = (await api.get(f"/v1/models/{MODEL}")).json()
    assert one == listed["data"][0]
    assert one["max_model_len"] == 4096
    error = error_of(await api.get("/v1/models/org/other"), 404)
    assert error["code"] == "model_not_found"


async def test_another_model_is_a_404_that_names_what_is_served() -> None:
    api = Api()
    for response in (
        await api.complete(model="gpt-4"),
        await api.chat(model="gpt-4"),
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'gpt-4'" in error["message"]
        assert f"'{MODEL}'" in error["message"]
    assert (await api.complete(model=None)).status_code == 200


async def test_unknown_routes_and_methods_answer_in_the_same_form() -> None:
    api = Api()
    assert error_of(await api.get("/v1/nothing"), 404)["code"] == "unknown_url"
    wrong = await api.get("/v1/completions")
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert error_of(await api.post("/v1/embeddings", {}), 404)["code"] == "unknown_url"
    assert http_error(418, "/", "GET").code == "http_error"


async def test_version_shows_settings_with_sources() -> None:
    response = await Api(api_key="sesame").get("/version", authorization="Bearer sesame")
    settings = response.json()["settings"]
    assert settings["api_key"]["source"] == "environment KVTIER_API_KEY"
    assert settings["port"] == {"value": 8000, "source": "default"}
    assert "sesame" not in response.text


async def test_the_schema_describes_both_bodies() -> None:
    paths = (await Api().get("/openapi.json")).json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "temperature" in body["properties"]


async def test_a_body_over_the_limit_is_a_413_by_its_declared_length() -> None:
    api = Api()
    async with api.client() as client:
        headers = {"content-length": str(limits.BODY_BYTES_MAX + 1)}
        response = await client.post("/v1/completions", content=b"{}", headers=headers)
    assert error_of(response, 413)["code"] == "request_too_large"


async def test_a_body_over_the_limit_is_a_413_while_it_arrives() -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 4 * limits.BODY_BYTES_MAX:
            sent += 1 << 20
            yield b" " * (1 << 20)

    async with Api().client() as client:
        response = await client.post("/v1/completions", content=pieces())
    assert error_of(response, 413)["code"] == "request_too_large"
    assert sent <= limits.BODY_BYTES_MAX + (1 << 20)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_return(stream: bool) -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    api = Api(engine, sequences_max=3)
    first = asyncio.create_task(api.complete(n=2, max_tokens=1))
    await engine.started.wait()
    response = await api.complete(n=2, stream=stream)
    error = error_of(response, 429)
    assert error["code"] == "queue_full"
    assert response.headers["retry-after"] == str(limits.RETRY_AFTER_S)
    assert api.admission.sequences == 2
    assert engine.gate is not None
    engine.gate.set()
    assert (await first).status_code == 200
    assert api.admission.sequences == 0
    assert (await api.complete(n=3, stream=stream)).status_code == 200
    assert api.service.counters.outcomes["completions", Outcome.QUEUE_FULL] == 1


async def test_a_draining_server_answers_503_and_finishes_what_it_took() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    api = Api(engine)
    first = asyncio.create_task(api.complete(max_tokens=1))
    await engine.started.wait()
    api.admission.drain()
    for stream in (False, True):
        assert error_of(await api.chat(stream=stream), 503)["code"] == "shutting_down"
    assert engine.gate is not None
    engine.gate.set()
    assert (await first).status_code == 200


class Broken:
    """An engine with a fault in it."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        for _ in request.prompt:
            raise RuntimeError("secret /path/to/weights")
        yield Delta("", (), (), Usage(0, 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_is_a_500_that_tells_nothing(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api(Broken())
    response = await api.complete(stream=stream)
    error = error_of(response, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text
    call_id = next(record.args[0] for record in caplog.records if isinstance(record.args, tuple))
    assert str(call_id) in error["message"]
    assert api.admission.sequences == 0
    assert api.service.counters.outcomes["completions", Outcome.ERROR] == 1


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [(FinishReason.ERROR, 500, "internal_error"), (FinishReason.ABORT, 503, "aborted")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_sequence_that_fails_fails_the_call(
    finish: FinishReason, status: int, code: str, stream: bool
) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        bad = request.request_id.endswith("-1")
        return [Step("", 0, finish, "secret")] if bad else [Step("a"), Step("b")] * 1000

    engine = ScriptedEngine(script=script)
    response = await Api(engine).complete(n=2, stream=False)
    assert error_of(response, status)["code"] == code
    assert "secret" not in response.text
    assert not engine.running


async def test_a_failure_after_the_first_event_ends_the_stream_as_an_event() -> None:
    steps = [Step("a"), Step("", 0, FinishReason.ERROR, "secret")]
    engine = ScriptedEngine(script=lambda _: steps)
    response = await Api(engine).complete(stream=True)
    assert response.status_code == 200
    lines = response.text.strip().split("\n\n")
    assert '"text":"a"' in lines[0]
    assert '"code":"internal_error"' in lines[1]
    assert len(lines) == 2
    assert "secret" not in response.text


async def test_outcomes_and_durations_are_counted() -> None:
    api = Api()
    await api.complete()
    events(await api.complete(stream=True))
    await api.complete(temperature=-1)
    await api.chat()
    counters = api.service.counters
    assert counters.outcomes == {
        ("completions", Outcome.OK): 2,
        ("completions", Outcome.REFUSED): 1,
        ("chat", Outcome.OK): 1,
    }
    assert sum(counters.duration.counts) == 3


class Confused:
    """A tokenizer with a fault in it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("secret")


async def test_a_fault_before_generation_tells_nothing_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = await Api(tokenizer=Confused()).complete()
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert any(record.levelno == logging.ERROR for record in caplog.records)
