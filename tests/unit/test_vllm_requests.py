"""Whose KV a request's is, and what its hints say."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.errors import ConfigError
from kvtier.types import Features, GroupKind, Hint, KVGroup, KVLayout, Namespace
from kvtier_adapters.vllm.identity import adapter_id, inputs_id, weights_id
from kvtier_adapters.vllm.requests import (
    Followed,
    reads_cache,
    request_features,
    request_namespace,
    uses_cache,
)

BASE = Namespace("weights", KVLayout((KVGroup(GroupKind.FULL, (0,), 1, 8, 8, "float32"),)))


def request(**more: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "num_tokens": 10,
        "num_computed_tokens": 4,
    }
    return SimpleNamespace(**fields | more)


def image(name: str, offset: int = 3) -> SimpleNamespace:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=5))


def test_a_plain_request_is_in_the_engines_own_namespace() -> None:
    assert request_namespace(BASE, request()) == BASE


def test_salt_adapter_and_images_each_make_another_namespace() -> None:
    lora = SimpleNamespace(lora_name="law", lora_path="")
    found = [
        request_namespace(BASE, each)
        for each in (
            request(),
            request(cache_salt="a"),
            request(cache_salt="b"),
            request(lora_request=lora),
            request(lora_request=lora, cache_salt="a"),
            request(mm_features=[image("cat")]),
            request(mm_features=[image("dog")]),
            request(mm_features=[image("cat", offset=4)]),
            request(mm_features=[image("cat"), image("dog", 9)]),
            request(mm_features=[image("cat")], lora_request=lora),
        )
    ]
    assert len(set(found)) == len(found)


def test_images_count_by_their_place_not_by_their_order() -> None:
    assert inputs_id([("a", 0, 5), ("b", 9, 5)]) == inputs_id([("b", 9, 5), ("a", 0, 5)])
    assert inputs_id([]) == ""


def test_requests_whose_tokens_do_not_say_all_are_left_alone() -> None:
    assert uses_cache(request())
    assert not uses_cache(request(prompt_embeds=object()))
    assert not uses_cache(request(resumable=True))
    assert reads_cache(request())
    assert not reads_cache(request(skip_reading_prefix_cache=True))


@pytest.mark.parametrize(
    ("settled", "computed", "known", "counted"),
    [
        (8, 8, 9, 8),
        # Found in blocks that another request fills in this step, or still being loaded.
        (0, 8, 9, 0),
        # A draft was rejected: its KV is overwritten in the next step.
        (12, 9, 10, 9),
        # A step that is under way was scheduled with a token that is not known yet.
        (11, 11, 10, 10),
    ],
)
def test_what_counts_as_computed(settled: int, computed: int, known: int, counted: int) -> None:
    followed = Followed(
        request(num_computed_tokens=computed, num_tokens=known),
        Sequence(BASE, bytes(32)),
        settled=settled,
    )
    assert followed.computed == counted


def test_hints_become_features() -> None:
    params = {"kvtier": {"hint": "done", "turn": 3, "ttl_s": 60, "pin_s": 1.5}, "other": 1}
    assert request_features(params) == (Features(3, Hint.DONE, 60.0, 1.5), "")
    assert request_features(None) == (Features(), "")
    assert request_features({"do_remote_decode": True}) == (Features(), "")


@pytest.mark.parametrize(
    "hints",
    [
        "done",
        {"hint": "maybe"},
        {"turn": 0},
        {"turn": True},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"pin_s": "1"},
        {"pin_s": 1e12},
        {"tll_s": 1},
    ],
)
def test_hints_that_cannot_be_are_as_if_not_given(hints: object) -> None:
    features, wrong = request_features({"kvtier": hints})
    assert features == Features()
    assert wrong


def nowhere(model: str, revision: str) -> Path | None:
    del model, revision
    return None


def test_changed_weights_have_another_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "README.md").write_text("a")

    def name(**config: Any) -> str:
        return weights_id(str(tmp_path), "main", "auto", config, altered=False, snapshot=nowhere)

    first = name(layers=2)
    assert name(layers=2) == first
    assert name(layers=3) != first
    (tmp_path / "README.md").write_text("another text")
    assert name(layers=2) == first
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert name(layers=2) != first


def test_a_hubs_weights_are_named_by_their_commit(tmp_path: Path) -> None:
    def name(commit: str) -> str:
        found = tmp_path / "models--a--b" / "snapshots" / commit
        return weights_id(
            "a/b", "main", "auto", {}, altered=False, snapshot=lambda _model, _revision: found
        )

    assert name("1f") == name("1f")
    assert name("1f") != name("2e")


def test_weights_that_are_nowhere_need_a_name() -> None:
    with pytest.raises(ConfigError, match="weights_id"):
        weights_id("a/b", "main", "auto", {}, altered=False, snapshot=nowhere)
    # Dummy weights follow from the config.
    first, second = (
        weights_id("a/b", "main", "dummy", {"layers": n}, altered=False, snapshot=nowhere)
        for n in (2, 3)
    )
    assert first != second


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(b"1")
    first = adapter_id("law", str(tmp_path))
    path.write_bytes(b"22")
    assert adapter_id("law", str(tmp_path)) != first
    assert adapter_id("law", "hub/law") != adapter_id("law", "hub/tax")
