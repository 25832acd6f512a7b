"""Measured costs over a restart: kept whole, or begun anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cache.worth.cost_store import FILE, Kept, KeptPrefill, load, name_of, save
from kvtier.constants import COST_FILE_BYTES_MAX, COST_KEPT_POINTS_MAX, COST_NAMES_MAX

KEPT = Kept(
    links={"disk": [(1e6, 0.5), (2e6, 1.0)]},
    moves={"raw": [(1e6, 0.001)]},
    prefill={"model cpu": KeptPrefill([(256.0, 0.002)], 1e-4)},
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / FILE, KEPT)
    assert load(tmp_path / FILE) == KEPT
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_nothing_there_is_nothing_kept(tmp_path: Path) -> None:
    assert load(tmp_path / FILE) == Kept()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "links": {}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {}, "moves": {}}',
        '{"version": 1, "links": {"a": [[1, -1]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": [[1, NaN]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": [[1, Infinity]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": [[0, 1]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": [[1, 1e308]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": [[5e-324, 1]]}, "moves": {}, "prefill": {}}',
        f'{{"version": 1, "links": {{"a": [[{10**400}, 1]]}}, "moves": {{}}, "prefill": {{}}}}',
        '{"version": 1, "links": {"a": [[1, 2, 3]]}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {"a": 7}, "moves": {}, "prefill": {}}',
        '{"version": 1, "links": {}, "moves": {}, "prefill": {"m": {"points": []}}}',
        "[" * 5000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert load(tmp_path / FILE) == Kept()


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    whole = json.dumps({"version": 1, "links": {}, "moves": {}, "prefill": {}})
    (tmp_path / FILE).write_text(whole + " " * COST_FILE_BYTES_MAX)
    assert load(tmp_path / FILE) == Kept()


def test_too_many_points_are_refused(tmp_path: Path) -> None:
    save(tmp_path / FILE, Kept(links={"disk": [(1.0, 1.0)] * (COST_KEPT_POINTS_MAX + 1)}))
    assert load(tmp_path / FILE) == Kept()


def test_only_the_latest_names_are_kept(tmp_path: Path) -> None:
    many = {f"model {i}": KeptPrefill([(1.0, 1.0)], 0.0) for i in range(COST_NAMES_MAX + 5)}
    save(tmp_path / FILE, Kept(prefill=many))
    assert list(load(tmp_path / FILE).prefill) == list(many)[5:]


def test_what_cannot_be_written_is_left(tmp_path: Path) -> None:
    save(tmp_path / "missing" / FILE, KEPT)
    assert list(tmp_path.iterdir()) == []


def test_a_name_tells_nothing_of_a_url() -> None:
    assert "secret" not in name_of("redis://user:secret@host")
    assert name_of("a") != name_of("b")
    assert name_of("redis://user:secret@host/1") == name_of("redis://user:guessed@host/1")
    assert name_of("redis://host/1") != name_of("redis://host/2")
