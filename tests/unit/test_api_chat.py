"""``/v1/chat/completions``: messages, form of answers and streams, log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from kvtier.types import Features, Hint
from kvtier_engine.types import Delta, FinishReason, GenerateRequest, Usage
from tests.lib.api_fakes import ScriptedEngine, Step
from tests.lib.api_harness import MODEL, Api, RawCall, error_of, events


async def test_a_chat_is_answered_in_openais_form() -> None:
    engine = ScriptedEngine()
    response = await Api(engine).chat("hi", max_tokens=2)
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["system_fingerprint"].startswith("kvtier-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert bytes(engine.requests[0].prompt) == b"user: hi\nassistant: "


async def test_messages_take_text_parts_and_the_developer_role() -> None:
    engine = ScriptedEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "x", "name": "someone"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "y"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    response = await Api(engine).post("/v1/chat/completions", body)
    assert response.status_code == 200
    assert bytes(engine.requests[0].prompt) == (
        b"system: ab\nuser: x\nassistant: \nuser: y\nassistant: "
    )


@pytest.mark.parametrize(
    ("roles", "turn"),
    [("system", 1), ("user", 1), ("system user assistant user", 2), ("user user user", 3)],
)
async def test_a_turn_is_a_message_of_the_user(roles: str, turn: int) -> None:
    engine = ScriptedEngine()
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    body = {"messages": messages, "max_tokens": 1, "n": 2}
    await Api(engine).post("/v1/chat/completions", body)
    assert [request.features for request in engine.requests] == [Features(turn)] * 2


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (None, Hint.NONE),
        ({}, Hint.NONE),
        ({"will_continue": False, "done": None}, Hint.NONE),
        ({"will_continue": True, "ttl_s": None}, Hint.WILL_CONTINUE),
        ({"will_continue": False, "done": True}, Hint.DONE),
    ],
)
async def test_hints_reach_the_engine(given: dict[str, Any] | None, hint: Hint) -> None:
    engine = ScriptedEngine()
    api = Api(engine)
    await api.chat("hi", max_tokens=1, kvtier=given)
    await api.complete("hi", max_tokens=1, kvtier=given)
    assert [request.features for request in engine.requests] == [Features(1, hint)] * 2


async def test_max_tokens_is_what_the_context_leaves_unless_given() -> None:
    engine = ScriptedEngine()
    api = Api(engine, context=100)
    prompt = len(b"user: hi\nassistant: ")
    await api.chat("hi")
    await api.chat("hi", max_tokens=3)
    await api.chat("hi", max_completion_tokens=4)
    await api.chat("hi", max_completion_tokens=5, max_tokens=5)
    asked = [request.sampling.max_tokens for request in engine.requests]
    assert asked == [100 - prompt, 3, 4, 5]


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ("hello", "messages", "invalid_type"),
        ([3], "messages.0", "invalid_type"),
        ([{"content": "x"}], "messages.0.role", "invalid_value"),
        ([{"role": "usr", "content": "x"}], "messages.0.role", "invalid_value"),
        ([{"role": ["user"], "content": "x"}], "messages.0.role", "invalid_value"),
        ([{"role": "tool", "content": "x"}], "messages.0.role", "unsupported_parameter"),
        ([{"role": "user"}], "messages.0.content", "invalid_type"),
        ([{"role": "user", "content": 3}], "messages.0.content", "invalid_type"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "invalid_type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0",
            "unsupported_parameter",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
            "messages.0.tool_calls",
            "unsupported_parameter",
        ),
        ([{"role": "assistant", "content": "x"}], "messages", "template_refused"),
    ],
)
async def test_bad_messages_are_named(messages: Any, param: str, code: str) -> None:
    body = {"model": MODEL, "messages": messages}
    error = error_of(await Api().post("/v1/chat/completions", body))
    assert (error["param"], error["code"]) == (param, code)


async def test_an_unknown_role_names_the_nearest() -> None:
    body = {"model": MODEL, "messages": [{"role": "asistant", "content": "x"}]}
    error = error_of(await Api().post("/v1/chat/completions", body))
    assert "did you mean 'assistant'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_bad_chat_fields_are_named(fields: dict[str, Any], param: str) -> None:
    assert error_of(await Api().chat(**fields))["param"] == param


async def test_logprobs_carry_bytes_and_alternatives() -> None:
    steps = [Step("é", 2), Step("z", 1, FinishReason.STOP)]
    api = Api(ScriptedEngine(script=lambda _: steps))
    body = (await api.chat(logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x7A]]
    assert content[0]["token"] == "bytes:\\xc3"
    assert content[2]["top_logprobs"] == [
        {"token": "z", "logprob": -0.5, "bytes": [0x7A]},
        {"token": "{", "logprob": -1.5, "bytes": [0x7B]},
    ]
    plain = (await api.chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in plain["content"]] == [[], [], []]


async def test_a_stream_starts_with_the_role_and_ends_with_the_reason() -> None:
    stream = events(await Api().chat(stream=True, max_tokens=3))
    deltas = [event["choices"][0]["delta"] for event in stream]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == ["a", "b", "c"]
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in stream]
    assert reasons == [None] * 4 + ["length"]
    assert {event["object"] for event in stream} == {"chat.completion.chunk"}
    assert {event["model"] for event in stream} == {MODEL}


async def test_each_choice_of_a_stream_has_its_role_first() -> None:
    stream = events(await Api().chat(stream=True, n=3, max_tokens=2))
    seen: dict[int, list[dict[str, Any]]] = {}
    for event in stream:
        choice = event["choices"][0]
        seen.setdefault(choice["index"], []).append(choice["delta"])
    assert sorted(seen) == [0, 1, 2]
    for deltas in seen.values():
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == "ab"
        assert deltas[-1] == {}


async def test_b149_chat_usage_streams_only_when_asked_for() -> None:
    api = Api()
    for options in (None, {}, {"include_usage": False}):
        stream = events(await api.chat(stream=True, stream_options=options, max_tokens=1))
        assert not any("usage" in event for event in stream)
    stream = events(
        await api.chat(stream=True, stream_options={"include_usage": True}, max_tokens=2)
    )
    assert all(event["usage"] is None for event in stream[:-1])
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == 2


async def test_streamed_logprobs_equal_the_whole_answers() -> None:
    api = Api()
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    whole = (await api.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    stream = events(await api.chat(stream=True, **fields))
    pieces = [event["choices"][0]["logprobs"] for event in stream]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == whole


async def test_text_is_escaped_into_one_line() -> None:
    text = 'line\nbreak "quoted" \\ é \u2028 😀'
    steps = [Step(text, 1, FinishReason.STOP)]
    api = Api(ScriptedEngine(script=lambda _: steps))
    stream = events(await api.chat(stream=True))
    assert stream[1]["choices"][0]["delta"]["content"] == text
    assert (await api.chat()).json()["choices"][0]["message"]["content"] == text


@dataclass
class Halting:
    """Says ``a``, and ``b`` only when told to."""

    gate: asyncio.Event

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        yield Delta("a", (97,), (), Usage(len(request.prompt), 1))
        await self.gate.wait()
        yield Delta("b", (98,), (), Usage(len(request.prompt), 2), FinishReason.STOP)


async def test_a_delta_is_sent_before_the_next_one_is_made() -> None:
    gate = asyncio.Event()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    call = RawCall(Api(Halting(gate)).app, "/v1/chat/completions", body)
    running = asyncio.create_task(call.run())
    await call.sent_text(b'"content":"a"')
    assert not gate.is_set()
    gate.set()
    await running
    assert call.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
