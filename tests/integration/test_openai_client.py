"""OpenAI's own client against ``kvtier-serve`` with its bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tests.lib.server import Served, serving

MODEL = "smollm2-135m"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
]
#: Two chunks of 64 tokens and something to compute.
LONG = "The quick brown fox jumps over the lazy dog. " * 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    disk = tmp_path_factory.mktemp("disk") / "kv"
    arguments = [f"--disk={disk}", "--chunk-tokens=64", "--dram=256MiB", "--api-key=sesame"]
    with serving(*arguments) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="sesame", max_retries=0) as made:
        yield made


def tiers(usage: CompletionUsage | None) -> dict[str, int]:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    found: dict[str, int] = getattr(usage.prompt_tokens_details, "kvtier")  # noqa: B009
    assert sum(found.values()) == usage.prompt_tokens_details.cached_tokens
    return found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvtier"


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=12
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions_with_logprobs_echo_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="One, two, three,",
        max_tokens=3,
        temperature=0,
        logprobs=2,
        echo=True,
        n=2,
    )
    assert len(answer.choices) == 2
    first, second = answer.choices
    assert first.text == second.text
    assert first.text.startswith("One, two, three, four")
    assert first.logprobs is not None
    assert first.logprobs.tokens is not None
    assert "".join(first.logprobs.tokens) == first.text
    values: list[float | None] = list(first.logprobs.token_logprobs or [])
    assert values[0] is None
    assert all(value is not None and value <= 0 for value in values[1:])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    raw = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert raw.decode() == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # Greedy takes the best one.
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)


def test_stop_ends_before_the_string(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": "One, two, three,",
        "max_tokens": 20,
        "temperature": 0,
    }
    answer = client.completions.create(**fields, stop=["five", "six"])
    assert answer.choices[0].text == " four, "
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(**fields, stop="five", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == " four, "


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=1.2, seed=11, n=2
        ).choices
        for _ in range(2)
    ]
    assert [choice.text for choice in texts[0]] == [choice.text for choice in texts[1]]
    assert texts[0][0].text != texts[0][1].text


def test_errors_become_the_clients_own(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    assert "8192" in long.value.message
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_b102_a_salt_isolates(client: openai.OpenAI) -> None:
    found = []
    for salt in ("a", "a", "b", ""):
        answer = client.completions.create(
            model=MODEL, prompt=LONG, max_tokens=1, extra_body={"cache_salt": salt}
        )
        found.append(sum(tiers(answer.usage).values()))
    prompt = found[1]
    assert found == [0, prompt, 0, 0]
    assert prompt >= 128
