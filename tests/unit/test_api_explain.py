"""``kvtier: {"explain": true}``: why a prompt was loaded or computed, beside its usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from http import HTTPStatus

from kvtier.types import Tier
from kvtier_engine.types import Delta, GenerateRequest, Why
from tests.lib.api_fakes import ScriptedEngine
from tests.lib.api_harness import Api, events

WHY = (
    Why(0, 4, Tier.DRAM, True, "faster", 0.25, 2.0),
    Why(4, 9, None, False, "absent"),
)
TOLD = [
    {
        "prompt": 0,
        "tokens": [0, 4],
        "tier": "dram",
        "decision": "loaded",
        "reason": "faster",
        "estimated_load_s": 0.25,
        "estimated_recompute_s": 2.0,
    },
    {
        "prompt": 0,
        "tokens": [4, 9],
        "tier": None,
        "decision": "recomputed",
        "reason": "absent",
        "estimated_load_s": None,
        "estimated_recompute_s": None,
    },
]


class Explaining(ScriptedEngine):
    """Gives reasons to who asks for them."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        async for delta in super().generate(request):
            why = WHY if request.explain else ()
            yield replace(delta, usage=replace(delta.usage, why=why))


async def test_usage_says_why_on_request() -> None:
    api = Api(Explaining())
    asked = await api.complete("ninebytes", kvtier={"explain": True})
    assert asked.json()["usage"]["kvtier"] == {"why": TOLD}
    for fields in ({}, {"kvtier": {"explain": False}}):
        assert "kvtier" not in (await api.complete("ninebytes", **fields)).json()["usage"]
    chat = await api.chat(kvtier={"explain": True})
    assert chat.json()["usage"]["kvtier"]["why"] == TOLD


async def test_each_prompt_has_its_reasons_and_choices_have_none() -> None:
    asked = await Api(Explaining()).complete(["one", "two"], n=2, kvtier={"explain": True})
    why = asked.json()["usage"]["kvtier"]["why"]
    assert [each["prompt"] for each in why] == [0, 0, 1, 1]


async def test_a_stream_says_it_with_its_usage() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = events(await Api(Explaining()).complete(kvtier={"explain": True}, **options))
    assert stream[-1]["usage"]["kvtier"] == {"why": TOLD}


async def test_explain_is_true_or_false() -> None:
    refused = await Api().complete(kvtier={"explain": "yes"})
    assert refused.status_code == HTTPStatus.BAD_REQUEST
    assert refused.json()["error"]["param"] == "kvtier.explain"
