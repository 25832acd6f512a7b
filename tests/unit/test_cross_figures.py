"""How near two engines' answers are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.engines.cross_engine import Case, make_prompts, read_cells, whole_chunks
from bench.engines.cross_figures import Answer, agreed, compare, kl, table
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder


def logs(**shares: float) -> dict[int, float]:
    return {int(name[1:]): math.log(share) for name, share in shares.items()}


def answer(tokens: list[int], *top: dict[int, float]) -> Answer:
    return Answer(tokens, list(top), found=0, tier=0)


def test_kl_of_whole_distributions_is_exact() -> None:
    truth, other = logs(t0=0.5, t1=0.5), logs(t0=0.75, t1=0.25)
    assert kl(truth, other) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))
    assert kl(truth, truth) == 0


def test_kl_of_the_likeliest_is_never_more_than_it_is() -> None:
    whole = logs(t0=0.5, t1=0.3, t2=0.15, t3=0.05), logs(t0=0.4, t1=0.2, t2=0.1, t3=0.3)
    exact = kl(*whole)
    truth = {token: whole[0][token] for token in (0, 1, 2)}
    other = {token: whole[1][token] for token in (0, 1, 3)}
    assert 0 < kl(truth, other) <= exact


def test_kl_sees_a_token_that_the_other_does_not_expect() -> None:
    truth, other = logs(t0=0.999, t1=0.001), logs(t2=0.999, t1=0.001)
    assert kl(truth, other) == pytest.approx(0.999 * math.log(999), rel=1e-3)
    assert kl(logs(t0=0.9, t1=0.1), logs(t0=0.1, t1=0.9)) > 1


def test_answers_agree_up_to_the_first_difference() -> None:
    assert agreed([1, 2, 3], [1, 2, 3]) == 3
    assert agreed([1, 2, 3], [1, 9, 3]) == 1
    with pytest.raises(ValueError, match="shorter"):
        agreed([1, 2], [1])


def test_distributions_count_while_they_follow_from_the_same() -> None:
    even, odd = logs(t1=0.5, t2=0.5), logs(t1=0.9, t2=0.1)
    cold = [answer([1, 1, 1], even, even, even), answer([1, 2, 1], even, even, even)]
    found = [answer([1, 2, 1], even, odd, odd), answer([1, 2, 1], even, even, even)]
    said = compare(cold, found)
    assert said["agreement"] == pytest.approx(4 / 6)
    assert said["answers_alike"] == 1
    # The third step of the first answer follows from other tokens.
    assert said["kl_max"] == pytest.approx(kl(even, odd))
    assert said["kl_mean"] == pytest.approx(kl(even, odd) / 5)
    assert said["kl_first"] == 0


def row(**more: Any) -> dict[str, Any]:
    plain = {
        "codec": "raw",
        "writer": "vllm",
        "reader": "kvtier-serve",
        "writer_block": 32,
        "reader_block": 16,
        "control": False,
        "prompts": 4,
        "hit_tokens": 512,
        "found_tokens": 1280,
        "stored_tokens": 1280,
    }
    return plain | {"agreement": 0.975, "answers_alike": 3, "kl_mean": 1.5e-5} | more


def test_the_table_has_a_line_for_each_cell_and_controls_below() -> None:
    text = table([row(), row(control=True, hit_tokens=0), row(codec="int8", found_tokens=512)])
    lines = text.splitlines()
    assert lines[2] == (
        "| `raw` | vllm (32) | kvtier-serve (16) | 512 of 1,280, 768 in HBM by then | 97.5 % "
        "| 3 of 4 | 1.5e-05 |"
    )
    assert lines[3].startswith("| `int8` | vllm (32) | kvtier-serve (16) | 512 of 1,280 |")
    assert lines[-1] == ("Control, kvtier-serve (16) with another weights_id: 0 of 1,280 tokens.")


def test_cells_are_read_from_lines_and_from_rows_of_results(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps({"cells": [row(), row()]}) + "\n")
    assert read_cells([path]) == [row()] * 3


def test_prompts_share_their_first_tokens_in_families(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path, config, tiny_tensors(config))
    prompts = make_prompts(folder, 6, 1.0)
    assert len(prompts) == 6
    assert prompts == make_prompts(folder, 6, 1.0)
    assert agreed(prompts[0][:240], prompts[3][:240]) == 240
    assert agreed(prompts[0][:240], prompts[4][:240]) < 240
    assert all(300 <= len(each) <= 1500 for each in prompts)
    assert len({tuple(each) for each in prompts}) == 6
    assert whole_chunks([0] * 511) == 256


def test_a_case_names_codec_and_blocks() -> None:
    case = Case.read("int8:64:16")
    assert (case.codec, case.block("vllm"), case.block("kvtier-serve")) == ("int8", 64, 16)
