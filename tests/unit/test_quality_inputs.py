"""What is measured: windows of a text, the text itself, the codecs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import ConfigError, RegistryError
from kvtier.registry import codecs
from kvtier.testing.calibrations import made_up_calibration
from kvtier.types import ShardLayout
from kvtier_engine.quality.codecs import build_codecs, read_calibration, wanted_names
from kvtier_engine.quality.results import Mode
from kvtier_engine.quality.text import DEFAULT_NAME, TEXT_BYTES_MAX, read_text
from kvtier_engine.quality.windows import (
    CONTINUATION_TOKENS_MIN,
    SHAPES,
    TOKENS_DEFAULT,
    TOKENS_MAX,
    WINDOW_TOKENS_MIN,
    Windows,
    cut_windows,
)

BEGIN = -1


def cut(
    text: int,
    tokens: int = 8192,
    *,
    mode: Mode = Mode.STORAGE,
    context: int = 1 << 20,
    begin: tuple[int, ...] = (),
) -> Windows:
    """Windows over the text 0, 1, 2, ..."""
    return cut_windows(range(text), begin, mode=mode, tokens=tokens, context_tokens=context)


def test_default_windows_have_the_documented_shapes() -> None:
    storage = cut(12_000, TOKENS_DEFAULT[Mode.STORAGE])
    assert (storage.prefix_tokens, storage.continuation_tokens) == (1536, 512)
    assert len(storage.token_ids) == 4
    in_place = cut(12_000, TOKENS_DEFAULT[Mode.IN_PLACE], mode=Mode.IN_PLACE)
    assert (in_place.prefix_tokens, in_place.continuation_tokens) == (256, 512)
    assert len(in_place.token_ids) == 2


@given(
    text=st.integers(0, 9000),
    tokens=st.integers(WINDOW_TOKENS_MIN, 9000),
    context=st.integers(WINDOW_TOKENS_MIN, 5000),
    mode=st.sampled_from(Mode),
    has_begin=st.booleans(),
)
def test_windows_are_whole_apart_and_within_the_text(
    text: int, tokens: int, context: int, mode: Mode, has_begin: bool
) -> None:
    begin = (BEGIN,) if has_begin else ()
    assume(text + len(begin) > WINDOW_TOKENS_MIN)
    windows = cut(text, tokens, mode=mode, context=context, begin=begin)
    fed = windows.fed_tokens
    assert windows.prefix_tokens % CHUNK_TOKENS_DEFAULT == 0 < windows.prefix_tokens
    assert CONTINUATION_TOKENS_MIN <= windows.continuation_tokens <= SHAPES[mode][1]
    assert fed <= min(tokens, context, sum(SHAPES[mode]))
    assert 1 <= len(windows.token_ids) <= tokens // fed
    end = 0
    for ids in windows.token_ids:
        assert len(ids) == fed + 1
        assert ids[: len(begin)] == begin
        own = ids[len(begin) :]
        assert own == tuple(range(own[0], own[0] + len(own)))
        # Only the last window's target, which is not fed, may be the next one's first token.
        assert own[0] >= end
        end = own[-1]
    assert end < text


def test_windows_reach_both_ends_of_the_text() -> None:
    windows = cut(10_000, 4096)
    assert windows.token_ids[0][0] == 0
    assert windows.token_ids[-1][-1] == 9999


def test_a_short_text_gives_one_smaller_window() -> None:
    windows = cut(601)
    assert (windows.prefix_tokens, windows.continuation_tokens) == (256, 344)
    assert windows.token_ids == (tuple(range(601)),)


def test_a_text_must_have_a_window_and_a_target() -> None:
    assert cut(WINDOW_TOKENS_MIN + 1).fed_tokens == WINDOW_TOKENS_MIN
    with pytest.raises(ConfigError, match=r"the text has 320 tokens; at least 321 are needed"):
        cut(WINDOW_TOKENS_MIN)
    with pytest.raises(ConfigError, match=r"the text has 0 tokens"):
        cut(0)
    with pytest.raises(ConfigError, match=r"the text has 319 tokens; at least 320 are needed"):
        cut(WINDOW_TOKENS_MIN - 1, begin=(BEGIN,))


@pytest.mark.parametrize("tokens", [-1, 0, WINDOW_TOKENS_MIN - 1, TOKENS_MAX + 1])
def test_tokens_have_bounds(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"--tokens {tokens}; allowed: 320 to 1048576"):
        cut(5000, tokens)


def test_a_context_must_hold_a_window() -> None:
    with pytest.raises(ConfigError, match="context is 256 tokens; at least 320"):
        cut(5000, context=256)


def test_the_shipped_text_is_prose_with_its_source_beside_it() -> None:
    name, text = read_text(None)
    assert name == DEFAULT_NAME
    assert 100_000 < len(text.encode()) < 120_000, "4,096 positions, and no more than that"
    assert text.startswith("Query 1. Do not Bodies act upon Light at a distance")
    assert not set("_[]{}<>") & set(text)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(b"\xef\xbb\xbfna\xc3\xafve")
    assert read_text(path) == ("own.txt", "naïve")


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(ConfigError, match=r"--text .*missing\.txt: No such file"):
        read_text(missing)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"na\xefve")
    with pytest.raises(ConfigError, match=r"latin\.txt: not UTF-8 at byte 2"):
        read_text(latin)


def test_a_text_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"a" * TEXT_BYTES_MAX)
    assert len(read_text(path)[1]) == TEXT_BYTES_MAX
    path.write_bytes(b"a" * (TEXT_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        read_text(path)


def test_all_is_every_installed_codec_that_can_be_made() -> None:
    assert wanted_names(" all ") == codecs.names()
    made, skipped = build_codecs(codecs.names(), None, strict=False)
    names = [codec.name for codec in made] + [each.codec for each in skipped]
    assert sorted(names) == codecs.names()
    assert {"raw", "fp8", "int8", "int6", "int5k4v"} <= {codec.name for codec in made}
    assert {each.codec for each in skipped} == {"int4", "int5k4v-c"}


def test_a_codec_that_cannot_be_made_is_skipped_or_an_error() -> None:
    made, skipped = build_codecs(["raw", "int4"], None, strict=False)
    assert [codec.name for codec in made] == ["raw"]
    assert skipped[0].codec == "int4"
    assert "needs a calibration" in skipped[0].reason
    with pytest.raises(ConfigError, match="codec 'int4' needs a calibration"):
        build_codecs(["raw", "int4"], None, strict=True)


def test_codecs_are_taken_in_the_order_given_and_once() -> None:
    assert wanted_names(" int8, raw,int8,") == ["int8", "raw"]


def test_an_unknown_codec_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RegistryError, match=r"no codec 'int88' \(did you mean 'int8'\?\)"):
        wanted_names("raw,int88")


@pytest.mark.parametrize("text", ["", " , "])
def test_no_codec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: all, fp8"):
        wanted_names(text)


SHAPE = ShardLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="float32", tokens=256)


def test_a_calibration_makes_the_centred_codecs(tmp_path: Path) -> None:
    path = tmp_path / "calibration"
    calibration = made_up_calibration(SHAPE)
    path.write_bytes(calibration.to_bytes())
    found = read_calibration(path, calibration.layout)
    assert found.digest == calibration.digest
    made, skipped = build_codecs(["int4", "raw", "int5k4v-c"], found, strict=True)
    assert [codec.name.partition(".")[0] for codec in made] == ["int4", "raw", "int5k4v-c"]
    assert skipped == []


def test_a_calibration_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calibration"
    calibration = made_up_calibration(SHAPE)
    with pytest.raises(ConfigError, match=r"--calibration .*calibration: No such file"):
        read_calibration(path, calibration.layout)
    path.write_bytes(b"nonsense" * 10)
    with pytest.raises(ConfigError, match="damaged, or no calibration"):
        read_calibration(path, calibration.layout)
    path.write_bytes(calibration.to_bytes())
    other = made_up_calibration(replace(SHAPE, layers=3)).layout
    with pytest.raises(ConfigError, match="other layers"):
        read_calibration(path, other)
