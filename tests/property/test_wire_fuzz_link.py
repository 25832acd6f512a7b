"""The wire and its links under a corpus, what becomes of it, and whatever Hypothesis makes up."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import MIB, WIRE_KEYS_MAX
from kvtier.wire import FROM_CLIENT, FROM_SERVER, Kind
from tests.lib.process_figures import Figures, figures
from tests.lib.soak_report import report
from tests.lib.wire_corpus import (
    CLIENT,
    CORPUS,
    FOUND,
    FOUND_PATH,
    GOLDEN,
    SERVER,
    WRONG,
    frame,
    mutated,
)
from tests.lib.wire_fuzz import check, parsed

#: What a header may cost while it is read: lists in lists, each of which promises as much as it
#: may, as deep as msgpack goes.
HEADER_COST_BYTES_MAX = 16 * MIB
#: What a stranger may have it cost, who has not been let in.
STRANGER_COST_BYTES_MAX = MIB // 2
GROWTH_BYTES_MAX = 16 * MIB
SOAK_S_MAX = 600.0
#: Streams that are remembered to be changed further, and how long they may be.
KEPT = 1000
KEPT_BYTES_MAX = 8192

CUTS = st.randoms(use_true_random=False)


def test_the_corpus_has_every_message_and_no_two_alike() -> None:
    """A search begins beside everything that the wire knows."""
    names = {Kind[name.upper()] for name in GOLDEN if name != "absent"}
    assert names == FROM_CLIENT | FROM_SERVER
    assert len(set(CORPUS)) == len(CORPUS)
    assert json.loads(FOUND_PATH.read_text()) == sorted(FOUND, key=lambda data: (len(data), data))


@pytest.mark.parametrize("name", [*CLIENT, *SERVER])
def test_right_streams_are_read_to_the_end(name: str) -> None:
    data = (CLIENT | SERVER)[name]
    assert not parsed(data).broken
    assert check(data, random.Random(name)).frames


@pytest.mark.parametrize("name", WRONG)
def test_wrong_streams_are_told_or_waited_for(name: str, rng: random.Random) -> None:
    told = check(WRONG[name], rng)
    assert not told.frames
    assert told.broken == (name != "the magic alone")


@pytest.mark.parametrize("name", [*CLIENT, *SERVER, *WRONG])
def test_b108_no_stream_costs_more_than_its_limits(name: str) -> None:
    data = (CLIENT | SERVER | WRONG)[name]
    assert cost_bytes(data, FROM_CLIENT | FROM_SERVER) < HEADER_COST_BYTES_MAX
    assert cost_bytes(data, frozenset({Kind.HELLO})) < STRANGER_COST_BYTES_MAX


def cost_bytes(data: bytes, accepts: Collection[Kind]) -> int:
    """What it takes at most to read a stream."""
    tracemalloc.start()
    try:
        parsed(data, accepts)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.sampled_from(CORPUS), st.sampled_from(CORPUS), st.binary(max_size=60), st.data(), CUTS)
def test_any_two_streams_spliced_are_found_alike_however_they_are_cut(
    first: bytes, second: bytes, between: bytes, data: st.DataObject, cuts: random.Random
) -> None:
    head = data.draw(st.integers(0, len(first)))
    tail = data.draw(st.integers(0, len(second)))
    check(first[:head] + between + second[tail:], cuts)


#: What msgpack can say, and more of it than a header may.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)
HEADERS = st.lists(VALUES, max_size=7) | VALUES


@given(st.sampled_from(sorted(Kind)), HEADERS, st.binary(max_size=40), CUTS)
def test_any_values_in_a_header_are_a_typed_error_or_a_message(
    kind: Kind, header: object, payload: bytes, cuts: random.Random
) -> None:
    told = check(frame(kind, header, payload), cuts)
    for message, _ in told.frames:
        keys = getattr(message, "keys", ())
        assert len(keys) <= WIRE_KEYS_MAX


@given(st.sampled_from(CORPUS), st.integers(0, 2**32), CUTS)
def test_any_mutation_is_found_alike_however_it_is_cut(
    data: bytes, number: int, cuts: random.Random
) -> None:
    check(mutated(random.Random(number), data), cuts)


class Search:
    """Changes streams of the corpus, and changes further what went far before it broke."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._kept = deque[bytes](maxlen=KEPT)
        self.streams = self.frames = 0

    def run(self, seconds: float) -> Figures:
        """Go on for so long, for one stream at least; return what this process holds then."""
        until_s = time.monotonic() + seconds
        while True:
            self._one()
            if time.monotonic() > until_s:
                gc.collect()
                return figures(os.getpid())

    def _one(self) -> None:
        some = self._kept if self._kept and self._draws.random() < 0.5 else CORPUS
        data = mutated(self._draws, self._draws.choice(some))
        told = check(data, self._draws)
        self.streams, self.frames = self.streams + 1, self.frames + len(told.frames)
        if told.frames and told.broken and len(data) < KEPT_BYTES_MAX:
            self._kept.append(data)


def test_mutations_of_the_corpus_for_a_long_time(
    rng: random.Random, scale: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that is found is typed, and found alike in one piece and in many; memory is flat."""
    seconds = 1.0 if scale == 1 else min(SOAK_S_MAX, 30.0 * scale)
    search = Search(rng)
    before = search.run(seconds / 3)
    after = search.run(seconds * 2 / 3)
    grown = after.anonymous_bytes - before.anonymous_bytes
    with capsys.disabled():
        told = f"{search.streams} streams in {seconds:.0f} s, {search.frames} frames in them"
        sys.stdout.write(f"\n{told}; {before}, then {after}\n")
    report(
        "mutated streams of the wire",
        scale,
        seconds=seconds,
        streams=search.streams,
        frames=search.frames,
        growth_bytes=grown,
    )
    assert search.frames > 0
    assert grown < GROWTH_BYTES_MAX
    assert after.descriptors == before.descriptors
    assert after.threads == before.threads
