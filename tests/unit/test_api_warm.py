"""Hints on requests, and prompts that are warmed for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtier.constants import PIN_S_MAX, TTL_S_MAX
from kvtier.types import Features, Hint
from kvtier_engine.api.service import Outcome
from kvtier_engine.types import GenerateRequest
from tests.lib.api_fakes import ScriptedEngine
from tests.lib.api_harness import MODEL, Api, error_of, events


@dataclass
class Shelf:
    """Tiers that hold all whole chunks of four tokens after so many looks."""

    looks: int = 0
    pinned: int = 8
    chunk_tokens: int = 4
    asked: list[GenerateRequest] = field(default_factory=list)

    def tokens(self, request: GenerateRequest) -> int:
        self.looks -= 1
        self.asked.append(request)
        return 0 if self.looks >= 0 else len(request.prompt) // 4 * 4

    def pinned_tokens(self, request: GenerateRequest) -> int:
        del request
        return self.pinned

    def unpin(self, request: GenerateRequest) -> int:
        self.asked.append(request)
        return self.pinned


def features_of(engine: Any) -> list[Features]:
    assert isinstance(engine, ScriptedEngine)
    return [request.features for request in engine.requests]


# Hints


async def test_hints_reach_the_engine() -> None:
    api = Api()
    response = await api.chat(kvtier={"will_continue": True, "ttl_s": 60, "pin": 3600.5})
    assert response.status_code == 200
    expected = Features(hint=Hint.WILL_CONTINUE, ttl_s=60.0, pin_s=3600.5)
    assert features_of(api.engine) == [expected]


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ({"ttl_s": 0}, "kvtier.ttl_s"),
        ({"ttl_s": -1}, "kvtier.ttl_s"),
        ({"ttl_s": TTL_S_MAX * 1.01}, "kvtier.ttl_s"),
        ({"ttl_s": "60"}, "kvtier.ttl_s"),
        ({"pin": True}, "kvtier.pin"),
        ({"pin": 0}, "kvtier.pin"),
        ({"pin": PIN_S_MAX * 1.01}, "kvtier.pin"),
        ({"pins": 5}, "kvtier.pins"),
        ({"done": True, "will_continue": True}, "kvtier"),
        ({"done": 1}, "kvtier.done"),
        ("pin", "kvtier"),
    ],
)
async def test_b113_a_hint_that_cannot_be_is_named(endpoint: str, hints: Any, param: str) -> None:
    error = error_of(await getattr(Api(), endpoint)(kvtier=hints))
    assert error["param"] == param


async def test_a_hint_that_is_not_known_is_called_so() -> None:
    error = error_of(await Api().complete("hello", kvtier={"pins": 5}))
    assert error["message"] == "'kvtier.pins' is not known here."


async def test_who_asks_for_a_pin_is_told_what_is_pinned() -> None:
    api = Api(held=Shelf(pinned=8))
    plain = (await api.complete("hello world!")).json()
    asked = (await api.complete("hello world!", kvtier={"pin": 60})).json()
    details = [answer["usage"]["prompt_tokens_details"]["kvtier"] for answer in (plain, asked)]
    assert "pinned" not in details[0]
    assert details[1]["pinned"] == 8


async def test_a_stream_tells_it_too_once_for_all_choices() -> None:
    api = Api(held=Shelf(pinned=8))
    options = {"include_usage": True}
    told = events(
        await api.complete("hello", n=3, stream=True, stream_options=options, kvtier={"pin": 60})
    )
    assert told[-1]["usage"]["prompt_tokens_details"]["kvtier"]["pinned"] == 8


# Warming


async def warm(api: Api, **body: Any) -> Any:
    return await api.post("/v1/kvtier/warm", body)


async def test_prompts_are_computed_and_the_answer_waits_until_they_are_held() -> None:
    shelf = Shelf(looks=5)
    api = Api(held=shelf)
    response = await warm(api, model=MODEL, prompt=["hello world", "hi"], cache_salt="s")
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "kvtier.warm"
    assert body["prompts"] == [
        {"prompt_tokens": 11, "held_tokens": 8},
        {"prompt_tokens": 2, "held_tokens": 0},
    ]
    assert body["usage"]["prompt_tokens"] == 13
    assert body["usage"]["completion_tokens"] == 0
    assert "choices" not in body
    assert isinstance(api.engine, ScriptedEngine)
    assert [request.sampling.max_tokens for request in api.engine.requests] == [1, 1]
    assert {request.cache_salt for request in shelf.asked} == {"s"}
    assert api.admission.sequences == 0


async def test_a_conversation_is_warmed_as_it_would_be_asked() -> None:
    api = Api(held=Shelf())
    messages = [{"role": "user", "content": "hello"}]
    await api.chat("hello")
    await warm(api, messages=messages, kvtier={"pin": 60})
    assert isinstance(api.engine, ScriptedEngine)
    asked, warmed = api.engine.requests
    assert asked.prompt == warmed.prompt
    assert warmed.features.pin_s == 60.0


async def test_a_server_without_tiers_says_that_it_holds_nothing() -> None:
    body = (await warm(Api(), prompt="hello world")).json()
    assert body["prompts"] == [{"prompt_tokens": 11, "held_tokens": 0}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages.0.role"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "whatever": 1}, "whatever"),
        ({"prompt": "x" * 5000}, "prompt"),
    ],
)
async def test_what_cannot_be_warmed_is_named(body: dict[str, Any], param: str) -> None:
    api = Api()
    assert error_of(await warm(api, **body))["param"] == param
    assert isinstance(api.engine, ScriptedEngine)
    assert not api.engine.requests
    assert api.service.counters.outcomes["warm", Outcome.REFUSED] == 1


async def test_warming_needs_the_key_too() -> None:
    api = Api(api_key="secret")
    error_of(await warm(api, prompt="a"), 401)


async def test_another_model_is_not_warmed() -> None:
    error_of(await warm(Api(), model="another", prompt="a"), 404)


# Unpinning


async def unpin(api: Api, **body: Any) -> Any:
    return await api.post("/v1/kvtier/unpin", body)


async def test_prompts_are_unpinned_and_nothing_is_computed() -> None:
    shelf = Shelf(pinned=8)
    api = Api(held=shelf)
    body = (await unpin(api, model=MODEL, prompt=["hello world", "hi"], cache_salt="s")).json()
    assert body["object"] == "kvtier.unpin"
    assert body["prompts"] == [
        {"prompt_tokens": 11, "unpinned_tokens": 8},
        {"prompt_tokens": 2, "unpinned_tokens": 8},
    ]
    assert "usage" not in body
    assert isinstance(api.engine, ScriptedEngine)
    assert not api.engine.requests
    assert {request.cache_salt for request in shelf.asked} == {"s"}
    assert api.service.counters.outcomes["unpin", Outcome.OK] == 1


async def test_a_conversation_is_unpinned_as_it_was_pinned() -> None:
    shelf = Shelf()
    api = Api(held=shelf)
    messages = [{"role": "user", "content": "hello"}]
    await warm(api, messages=messages, kvtier={"pin": 60})
    pinned = shelf.asked[-1].prompt
    await unpin(api, messages=messages)
    assert shelf.asked[-1].prompt == pinned


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "kvtier": {"pin": 5}}, "kvtier"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
    ],
)
async def test_what_cannot_be_unpinned_is_named(body: dict[str, Any], param: str) -> None:
    shelf = Shelf()
    assert error_of(await unpin(Api(held=shelf), **body))["param"] == param
    assert not shelf.asked


async def test_unpinning_needs_the_key_too() -> None:
    api = Api(api_key="secret", held=(shelf := Shelf()))
    assert (await unpin(api, prompt="hello")).status_code == 401
    assert not shelf.asked
