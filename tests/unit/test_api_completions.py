"""``/v1/completions``: prompts, choices, echo, log-probabilities, usage, streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.types import Tier
from kvtier_engine.api import limits
from kvtier_engine.types import FinishReason, GenerateRequest
from tests.lib.api_fakes import ByteTokenizer, ScriptedEngine, Step
from tests.lib.api_harness import MODEL, Api, error_of, events


async def test_a_text_prompt_is_answered_in_openais_form() -> None:
    engine = ScriptedEngine()
    response = await Api(engine).complete("hello", max_tokens=3)
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert response.headers["x-request-id"] == body["id"]
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}
    ]
    assert engine.requests[0].prompt == tuple(b"hello")


async def test_max_tokens_is_sixteen_unless_given_or_less_is_left() -> None:
    engine = ScriptedEngine()
    await Api(engine, context=100).complete("hello")
    await Api(engine, context=15).complete("hello")
    assert [request.sampling.max_tokens for request in engine.requests] == [16, 10]


async def test_prompts_come_in_four_forms() -> None:
    engine = ScriptedEngine()
    api = Api(engine)
    for prompt in ("ab", [97, 98], ["ab", "cd"], [[97, 98], [99]], ["ab", [99]]):
        assert (await api.complete(prompt, max_tokens=1)).status_code == 200
    prompts = [request.prompt for request in engine.requests]
    assert prompts == [
        (97, 98), (97, 98), (97, 98), (99, 100), (97, 98), (99,), (97, 98), (99,)
    ]  # fmt: skip


async def test_a_long_text_prompt_is_encoded_beside_the_loop() -> None:
    threads: list[str] = []

    class Watched(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread().name)
            return super().encode(text, add_special_tokens=add_special_tokens)

    api = Api(context=50_000, tokenizer=Watched())
    for length in (limits.INLINE_ENCODE_CHARS_MAX, limits.INLINE_ENCODE_CHARS_MAX + 1):
        usage = (await api.complete("x" * length, max_tokens=1)).json()["usage"]
        assert usage["prompt_tokens"] == length
    assert threads[0] == threading.main_thread().name
    assert threads[1] != threads[0]


async def test_choices_and_batches_are_numbered_prompt_by_prompt() -> None:
    engine = ScriptedEngine(script=lambda request: [named(request)])
    response = await Api(engine).complete(["x", "yy"], n=2, max_tokens=1, seed=7)
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["x7", "x8", "yy7", "yy8"]
    # Each prompt counts once, every choice's completion counts.
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4
    assert len({request.request_id for request in engine.requests}) == 4


def named(request: GenerateRequest) -> Step:
    text = bytes(request.prompt).decode() + str(request.sampling.seed)
    return Step(text, finish=FinishReason.STOP)


@pytest.mark.parametrize(("seed", "seeds"), [(-1, [2**63 - 1, 0]), (2**63 - 1, [2**63 - 1, 0])])
async def test_seeds_stay_in_range(seed: int, seeds: list[int]) -> None:
    engine = ScriptedEngine()
    await Api(engine).complete(n=2, seed=seed)
    assert [request.sampling.seed for request in engine.requests] == seeds


async def test_no_seed_stays_none() -> None:
    engine = ScriptedEngine()
    await Api(engine).complete(n=2)
    assert [request.sampling.seed for request in engine.requests] == [None, None]


async def test_sampling_fields_reach_the_engine() -> None:
    engine = ScriptedEngine()
    await Api(engine).complete(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-1, frequency_penalty=1, logit_bias={"5": -100.0, "6": 1.5}, stop="END",
        stop_token_ids=[1, 2, 2], include_stop_str_in_output=True, ignore_eos=True, priority=-3,
        cache_salt="tenant", user="someone", unknown_field={"is": "ignored"}, best_of=1, suffix="",
    )  # fmt: skip
    request = engine.requests[0]
    assert (request.cache_salt, request.priority) == ("tenant", -3)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 1)
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert (sampling.stop, sampling.stop_token_ids) == (("END",), (1, 2))
    assert (sampling.include_stop, sampling.ignore_eos) == (True, True)
    assert sampling.top_logprobs is None


async def test_nulls_stand_for_defaults() -> None:
    engine = ScriptedEngine()
    response = await Api(engine).complete(
        max_tokens=None, temperature=None, top_p=None, n=None, stop=None, seed=None, stream=None,
        logit_bias=None, logprobs=None, echo=None, user=None, stream_options=None, best_of=None,
    )  # fmt: skip
    assert response.status_code == 200
    assert engine.requests[0].sampling.temperature == 1.0


async def test_logprobs_come_in_columns_with_offsets() -> None:
    engine = ScriptedEngine(script=lambda _: [Step("é", 2), Step("z", finish=FinishReason.LENGTH)])
    response = await Api(engine).complete(logprobs=2, max_tokens=3)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "z"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][2] == {"z": -0.5, "{": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_b153_echo_with_logprobs_scores_every_prompt_token_each_time() -> None:
    engine = ScriptedEngine()
    api = Api(engine)
    answers = [
        (await api.complete("ninebytes", echo=True, logprobs=1, max_tokens=1)).json()
        for _ in range(2)
    ]
    for answer in answers:
        choice = answer["choices"][0]
        assert choice["text"] == "ninebytesa"
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == "ninebytesa"
        assert logprobs["token_logprobs"] == [None, *[-0.5] * 9]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == list(range(10))
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [request.sampling.prompt_logprobs for request in engine.requests] == [1, 1]


async def test_prompt_logprobs_are_asked_for_only_with_echo() -> None:
    engine = ScriptedEngine()
    api = Api(engine)
    await api.complete(logprobs=1)
    await api.complete(echo=True)
    assert [request.sampling.prompt_logprobs for request in engine.requests] == [None, None]


async def test_scoring_alone_returns_no_token() -> None:
    response = await Api().complete("abc", echo=True, logprobs=0, max_tokens=0)
    body = response.json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 3


async def test_max_tokens_zero_without_echo_is_refused() -> None:
    assert error_of(await Api().complete(max_tokens=0))["param"] == "max_tokens"


async def test_echo_of_tokens_is_their_text() -> None:
    response = await Api().complete([104, 105], echo=True, max_tokens=1)
    assert response.json()["choices"][0]["text"] == "hia"


def joined(stream: Sequence[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize("echo", [False, True])
async def test_a_stream_says_what_the_whole_answer_says(echo: bool) -> None:
    api = Api()
    fields: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "echo": echo, "n": 2}
    whole = (await api.complete("abc", **fields)).json()
    stream = events(await api.complete("abc", stream=True, **fields))
    for index in (0, 1):
        expected = whole["choices"][index]
        assert joined(stream, index) == expected["text"]
        pieces = [
            choice["logprobs"]
            for event in stream
            for choice in event["choices"]
            if choice["index"] == index
        ]
        for column, values in expected["logprobs"].items():
            assert [item for piece in pieces for item in piece[column]] == values
    assert len({event["id"] for event in stream}) == 1
    finishes = [choice["finish_reason"] for event in stream for choice in event["choices"]]
    assert finishes.count("length") == 2


async def test_b149_usage_streams_only_when_asked_for() -> None:
    api = Api()
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        stream = events(await api.complete(stream=True, stream_options=options))
        assert not any("usage" in event for event in stream)
    stream = events(await api.complete(stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in stream[:-1]] == [None] * (len(stream) - 1)
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["total_tokens"] == 5 + 16


async def test_b150_completion_tokens_agree_streaming_or_not() -> None:
    def two_at_once(_: GenerateRequest) -> list[Step]:
        return [Step("ab", 2), Step("", 0), Step("cd", 2), Step("e", 1, FinishReason.LENGTH)]

    api = Api(ScriptedEngine(script=two_at_once))
    fields = {"max_tokens": 5, "ignore_eos": True}
    whole = (await api.complete("seven77", **fields)).json()["usage"]
    options = {"include_usage": True}
    stream = events(await api.complete("seven77", stream=True, stream_options=options, **fields))
    for usage in (whole, stream[-1]["usage"]):
        figures = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        assert figures == (7, 5, 12)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([Step("a"), Step("", 1, FinishReason.STOP)], "a"),
        ([Step("ab"), Step("cd"), Step("", 1, FinishReason.STOP)], "abcd"),
        ([Step("", 1, FinishReason.STOP)], ""),
        ([Step("ab"), Step("cdef", 2, FinishReason.STOP)], "abcdef"),
    ],
)
async def test_b152_streamed_text_is_the_whole_text(steps: list[Step], text: str) -> None:
    api = Api(ScriptedEngine(script=lambda _: steps))
    whole = (await api.complete(stop=["bc"])).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    stream = events(await api.complete(stop=["bc"], stream=True))
    assert joined(stream) == text
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"


async def test_held_back_text_makes_no_empty_event() -> None:
    steps = [Step("a"), Step(""), Step("b", 1, FinishReason.STOP)]
    stream = events(await Api(ScriptedEngine(script=lambda _: steps)).complete(stream=True))
    assert [event["choices"][0]["text"] for event in stream] == ["a", "b"]


async def test_usage_names_the_tiers_and_b102_salts_isolate() -> None:
    api = Api()
    cached = []
    for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        usage = (await api.complete("ninebytes", **salt)).json()["usage"]
        details = usage["prompt_tokens_details"]
        assert details["kvtier"] == dict.fromkeys(Tier, 0) | {"dram": details["cached_tokens"]}
        cached.append(details["cached_tokens"])
    assert cached == [0, 8, 0, 0]


async def test_cached_tokens_of_many_choices_are_the_first_ones() -> None:
    usage = (await Api().complete("ninebytes", n=3)).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (9, 0)
