"""From tokens to text: stop strings, end tokens, lengths, what is held back."""

from __future__ import annotations

import codecs
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_engine.output import OutputState, StopMatcher
from kvtier_engine.types import FinishReason, SamplingParams
from tests.lib.toy_engine import ToyEngine, prompt_of
from tests.lib.toy_model import reference

END = 99


class PieceDetokenizer:
    """Token i is the i-th piece of bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, /) -> str:
        return self._utf8.decode(self._pieces[token_id]) if token_id < len(self._pieces) else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def said(
    pieces: list[bytes], sampling: SamplingParams, tokens: list[int] | None = None
) -> tuple[list[str], FinishReason | None]:
    """Push tokens until one has a reason; return each one's text and the reason."""
    state = OutputState(sampling, PieceDetokenizer(pieces), frozenset({END}))
    texts = []
    for token in range(len(pieces)) if tokens is None else tokens:
        piece = state.push(token)
        texts.append(piece.text)
        if piece.finish_reason is not None:
            return texts, piece.finish_reason
    return texts, None


AB_CD_EF = [b"ab", b"cd", b"ef"]
STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH


class TestB152StopStrings:
    @pytest.mark.parametrize(
        ("stops", "include", "text"),
        [
            (["bc"], False, "a"),
            (["bc"], True, "abc"),
            (["ef"], False, "abcd"),
            (["ef"], True, "abcdef"),
            (["a"], False, ""),
            (["a"], True, "a"),
            (["bcd", "c"], False, "ab"),
            (["cde", "de", "e"], False, "ab"),
        ],
    )
    def test_b152_stop_strings_ignore_token_edges(
        self, stops: list[str], include: bool, text: str
    ) -> None:
        sampling = SamplingParams(max_tokens=9, stop=tuple(stops), include_stop=include)
        for pieces in (AB_CD_EF, [b"abcdef"], [bytes([c]) for c in b"abcdef"]):
            texts, reason = said(pieces, sampling)
            assert ("".join(texts), reason) == (text, STOP)

    def test_b152_only_what_may_become_a_stop_string_is_held_back(self) -> None:
        sampling = SamplingParams(max_tokens=9, stop=("cdx", "\n\n"))
        texts, _ = said([b"ab", b"cd", b"e", b"\n", b"f"], sampling)
        assert texts == ["ab", "", "cde", "", "\nf"]

    def test_b152_what_was_held_back_comes_out_at_the_end(self) -> None:
        texts, reason = said([b"ab", b"c"], SamplingParams(max_tokens=2, stop=("cd",)))
        assert (texts, reason) == (["ab", "c"], LENGTH)
        texts, reason = said([b"ab", b"c"], SamplingParams(max_tokens=9, stop=("cd",)), [0, 1, END])
        assert (texts, reason) == (["ab", "", "c"], STOP)

    def test_b152_a_stop_string_in_the_last_token_is_a_stop(self) -> None:
        assert said([b"ab", b"cd"], SamplingParams(max_tokens=2, stop=("d",))) == (
            ["ab", "c"],
            STOP,
        )

    @given(
        text=st.text("ab", max_size=12),
        stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
        cuts=st.sets(st.integers(0, 12)),
        include=st.booleans(),
    )
    def test_b152_any_cut_into_tokens_gives_the_same_text(
        self, text: str, stops: list[str], cuts: set[int], include: bool
    ) -> None:
        edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        matcher = StopMatcher(stops, include_stop=include)
        shown, ended = "", False
        for piece in pieces:
            final, ended = matcher.push(piece)
            shown += final
            if ended:
                break
        shown += "" if ended else matcher.finish()
        assert (shown, ended) == naive(text, stops, include)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Read character by character; the longest stop string that ends first ends the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


class TestEnds:
    def test_an_end_token_shows_nothing_and_ends(self) -> None:
        texts, reason = said(AB_CD_EF, SamplingParams(max_tokens=9), [0, END])
        assert (texts, reason) == (["ab", ""], STOP)

    def test_ignore_eos_goes_on(self) -> None:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        texts, reason = said(AB_CD_EF, sampling, [0, END, 1])
        assert (texts, reason) == (["ab", "", "cd"], LENGTH)

    def test_stop_tokens_end_even_so_and_show_their_text_on_request(self) -> None:
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(1,))
        assert said(AB_CD_EF, sampling) == (["ab", ""], STOP)
        assert said(AB_CD_EF, replace(sampling, include_stop=True)) == (["ab", "cd"], STOP)

    def test_an_unfinished_character_waits_for_its_rest(self) -> None:
        euro = "€".encode()
        texts, _ = said([euro[:1], euro[1:2], euro[2:]], SamplingParams(max_tokens=9))
        assert texts == ["", "", "€"]

    def test_an_unfinished_character_at_the_end_is_shown_as_broken(self) -> None:
        texts, reason = said([b"a", "€".encode()[:2]], SamplingParams(max_tokens=2))
        assert (texts, reason) == (["a", "\ufffd"], LENGTH)


class TestDeltas:
    def test_b150_completion_tokens_are_counted_exactly(self) -> None:
        engine = ToyEngine()
        answer = engine.run(prompt_of(1, 7), 5)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 5)
        assert [delta.usage.completion_tokens for delta in answer.deltas] == [1, 2, 3, 4, 5]
        assert len(answer.tokens) == 5

    def test_b150_tokens_of_a_stop_string_count_too(self) -> None:
        prompt = prompt_of(1, 7)
        letters = "".join(chr(97 + token % 26) for token in reference(prompt, 4))
        engine = ToyEngine()
        request = engine.request(prompt, 9)
        stopping = replace(request, sampling=replace(request.sampling, stop=(letters[2:4],)))
        answer = engine.send(stopping)
        engine.finish()
        assert answer.text == letters[:2]
        assert answer.finish_reason is STOP
        assert answer.usage.completion_tokens == len(answer.tokens) == 4

    def test_logprobs_stand_beside_their_tokens(self) -> None:
        engine = ToyEngine()
        request = engine.request(prompt_of(1, 7), 5)
        plain = engine.send(request)
        scored = engine.send(
            replace(request, request_id="s", sampling=replace(request.sampling, top_logprobs=2))
        )
        engine.finish()
        assert all(delta.logprobs == () for delta in plain.deltas)
        for delta in scored.deltas:
            assert tuple(value.token_id for value in delta.logprobs) == delta.token_ids

    def test_the_end_token_of_the_model_ends_the_answer(self) -> None:
        prompt = prompt_of(1, 7)
        third = reference(prompt, 3)[2]
        engine = ToyEngine(end_ids=frozenset({third}))
        answer = engine.submit(prompt, 9)
        engine.finish()
        assert answer.finish_reason is STOP
        assert answer.usage.completion_tokens == 3
        assert len(answer.text) == 2
