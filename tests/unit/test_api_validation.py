"""Bad bodies and parameters: 400 each, naming the field, before the engine hears of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier_engine.api import limits, routes
from kvtier_engine.api.schemas import UNSUPPORTED
from tests.lib.api_fakes import VOCAB, ScriptedEngine
from tests.lib.api_harness import MODEL, Api, error_of

BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "0.5"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.5},
    {"frequency_penalty": math.inf},
    {"seed": 1.5},
    {"seed": 2**63},
    {"seed": "7"},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": 10**30},
    {"max_tokens": "5"},
    {"n": 0},
    {"n": limits.CHOICES_MAX + 1},
    {"n": True},
    {"stream": "yes"},
    {"stream": 1},
    {"stream_options": []},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {str(VOCAB): 1}},
    {"logit_bias": {"AI": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1.0": 1}},
    {"logit_bias": {"01": 1}},
    {"logit_bias": {"٣": 1}},
    {"logit_bias": {"5": math.nan}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"5": "x"}},
    {"logit_bias": [1]},
    {"logit_bias": {str(i): 1 for i in range(limits.LOGIT_BIAS_ENTRIES_MAX + 1)}},
    {"stop": 3},
    {"stop": [3]},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": {"a": 1}},
    {"stop": ["x"] * (limits.STOP_STRINGS_MAX + 1)},
    {"stop": "x" * (limits.STOP_STRING_CHARS_MAX + 1)},
    {"stop_token_ids": [VOCAB]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": [1] * (limits.STOP_TOKEN_IDS_MAX + 1)},
    {"logprobs": -1},
    {"logprobs": limits.TOP_LOGPROBS_MAX + 1},
    {"logprobs": True},
    {"echo": "yes"},
    {"ignore_eos": 1},
    {"cache_salt": 3},
    {"cache_salt": "x" * (limits.CACHE_SALT_CHARS_MAX + 1)},
    {"priority": 2**31},
    {"priority": 0.5},
    {"best_of": 2},
    {"kvtier": "done"},
    {"kvtier": {"done": 1}},
    {"kvtier": {"will_continue": "yes"}},
    {"kvtier": {"will_continue": True, "done": True}},
]


def shown(fields: object) -> str:
    return str(fields)[:40]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=shown)
async def test_b103_a_bad_field_is_a_400_that_names_it(fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    api = Api(engine)
    error = error_of(await api.complete(**fields))
    (name,) = fields
    assert error["param"].split(".")[0] == name
    assert error["type"] == "invalid_request_error"
    assert not engine.requests
    # And the server goes on as before.
    assert (await api.complete(max_tokens=1)).json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 1},
        {"n": limits.CHOICES_MAX},
        {"logprobs": limits.TOP_LOGPROBS_MAX},
        {"logit_bias": {str(VOCAB - 1): 100}},
        {"logit_bias": {str(i): 1 for i in range(VOCAB)}},
        {"stop_token_ids": [0, VOCAB - 1]},
        {"stop": [f"{i}" for i in range(limits.STOP_STRINGS_MAX)]},
        {"cache_salt": "x" * limits.CACHE_SALT_CHARS_MAX},
        {"seed": -(2**63)},
        {"best_of": 2, "n": 2},
    ],
    ids=shown,
)
async def test_a_value_at_its_limit_is_taken(fields: dict[str, Any]) -> None:
    response = await Api().complete(max_tokens=1, **fields)
    assert response.status_code == 200, response.text


async def test_a_bias_on_the_last_place_is_counted_apart_from_the_vocabulary() -> None:
    many = {str(i): 1 for i in range(limits.LOGIT_BIAS_ENTRIES_MAX + 1)}
    assert (
        str(limits.LOGIT_BIAS_ENTRIES_MAX)
        in error_of(await Api().complete(logit_bias=many))["message"]
    )


UNSERVED: dict[str, Any] = {
    "suffix": "end",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {},
    "prediction": {},
    "web_search_options": {},
    "prompt_embeds": "x",
    "structured_outputs": {"json": {}},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= x",
    "allowed_token_ids": [1] * 5000,
    "bad_words": ["x"],
    "min_tokens": 1,
    "use_beam_search": True,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "x",
    "chat_template_kwargs": {"x": 1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_b104_what_is_not_served_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    api = Api()
    error = error_of(await api.chat(**{name: UNSERVED[name]}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for neutral in UNSUPPORTED[name]:
        assert (await api.chat(max_tokens=1, **{name: neutral})).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"null", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 50_000, "invalid_json"),
        (b"{}", "missing_required_parameter"),
        (b'{"prompt": "x", "model": 3}', "invalid_type"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_value"),
    ],
    ids=shown,
)
async def test_a_body_that_is_none_is_a_400(body: bytes, code: str) -> None:
    error = error_of(await Api().post("/v1/completions", body))
    assert error["code"] in {code, "invalid_type"}


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([""], "empty_prompt"),
        (["a", []], "empty_prompt"),
        ([[]], "empty_prompt"),
        (None, "invalid_type"),
        (3, "invalid_type"),
        ({"text": "x"}, "invalid_type"),
        ([None], "invalid_type"),
        (["a", 3], "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([1.5], "invalid_type"),
        ([True], "invalid_type"),
        ([[1], [[2]]], "invalid_type"),
        ([VOCAB], "invalid_value"),
        ([-1], "invalid_value"),
        ([[1], [10**20]], "invalid_value"),
        (["x"] * (limits.PROMPTS_MAX + 1), "too_many_prompts"),
    ],
    ids=shown,
)
async def test_a_bad_prompt_is_a_400(prompt: Any, code: str) -> None:
    error = error_of(await Api().complete(prompt))
    assert (error["param"], error["code"]) == ("prompt", code)


async def test_a_call_is_bounded_in_sequences() -> None:
    api = Api(sequences_max=limits.SEQUENCES_PER_CALL_MAX)
    at_limit = ["x"] * (limits.SEQUENCES_PER_CALL_MAX // 2)
    assert (await api.complete(at_limit, n=2, max_tokens=1)).status_code == 200
    error = error_of(await api.complete([*at_limit, "x"], n=2, max_tokens=1))
    assert str(limits.SEQUENCES_PER_CALL_MAX) in error["message"]


async def test_a_conversation_is_bounded_in_messages() -> None:
    message = {"role": "user", "content": "x"}
    body = {"model": MODEL, "messages": [message] * (limits.MESSAGES_MAX + 1)}
    assert error_of(await Api().post("/v1/chat/completions", body))["param"] == "messages"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "figures"),
    [
        (20, 1, (21, 20, 1)),
        (10, 10, (20, 10, 10)),
        (16, None, (17, 16, 1)),
    ],
)
async def test_b156_too_long_names_the_right_figures(
    prompt: int, max_tokens: int | None, figures: tuple[int, int, int]
) -> None:
    api = Api(context=16)
    error = error_of(await api.complete("x" * prompt, max_tokens=max_tokens))
    assert error["code"] == "context_length_exceeded"
    total, asked, output = figures
    assert (
        f"maximum context length is 16 tokens. However, you requested {total} tokens"
        in (error["message"])
    )
    assert f"({asked} in the prompt, {output} for the completion)" in error["message"]


async def test_b156_what_just_fits_is_served() -> None:
    api = Api(context=16)
    assert (await api.complete("x" * 15, max_tokens=1)).status_code == 200
    assert (await api.complete("x" * 10)).json()["usage"]["completion_tokens"] == 6


async def test_b156_a_long_chat_is_refused_with_the_code() -> None:
    error = error_of(await Api(context=16).chat("x" * 50))
    assert error["code"] == "context_length_exceeded"


async def test_errors_quote_what_was_sent_in_short() -> None:
    error = error_of(await Api().complete(logit_bias={"x" * 100_000: 1}))
    assert len(json.dumps(error)) < 500


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()


def test_the_page_names_every_limit() -> None:
    rows = [line for line in PAGE.partition("## Limits")[2].splitlines() if line.startswith("| ")]
    told = sorted(int(number) for row in rows for number in re.findall(r"^\| (\d+) \|", row))
    unlisted = {"INLINE_ENCODE_CHARS_MAX"}
    names = [name for name in dir(limits) if name.endswith("_MAX") and name not in unlisted]
    assert told == sorted(getattr(limits, name) for name in names)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_the_page_names_what_is_not_served(name: str) -> None:
    taken = [f"`{json.dumps(value)}`" for value in UNSUPPORTED[name] if value is not None]
    assert f"| `{name}` | {', '.join(taken) or '—'} |" in PAGE


def test_the_page_names_every_code() -> None:
    folder = Path(routes.__file__).parent
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    codes = set(re.findall(r'code="(\w+)"', text)) - {"http_error"}
    assert codes
    for code in codes | {"invalid_value"}:
        assert f"`{code}`" in PAGE, code
