"""Traces: what a file may hold, what is wrong with others, sessions and their turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvtier.errors import ConfigError, MissingExtraError
from kvtier.sim.reader import read_trace
from kvtier.sim.study import session_hints
from kvtier.sim.trace import HINTS, Request, Trace, make_trace
from kvtier.types import Hint

GOOD: dict[str, Any] = {
    "timestamp": 1000,
    "input_length": 1024,
    "output_length": 5,
    "hash_ids": [7, 9],
}
LOGGED: dict[str, Any] = {
    "time": 1.0,
    "keys": ["a", "b"],
    "chunk_tokens": 256,
    "prompt_tokens": 600,
    "hit_tokens": {},
    "turn": 1,
    "hint": "none",
}


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def traced(*paths: list[int]) -> Trace:
    return make_trace([Request(float(i), path, 16) for i, path in enumerate(paths)], 16)


def test_ids_and_ranges_say_the_same(tmp_path: Path) -> None:
    ids = written(tmp_path / "ids", GOOD | {"hash_ids": [7, 20, 21, 22]})
    ranges = {key: value for key, value in GOOD.items() if key != "hash_ids"}
    ranges["hash_ranges"] = [[7, 7], [20, 22]]
    other = written(tmp_path / "ranges", ranges)
    for trace in (read_trace(ids), read_trace(other)):
        assert list(trace.path(0)) == [0, 1, 2, 3]
        assert list(trace.parents) == [-1, 0, 1, 2]
        assert (trace.block_tokens, list(trace.times_s)) == (512, [1.0])


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    good = {"timestamp": 1.5, "input_length": 1024.0, "hash_ids": [7.0, 9]}
    trace = read_trace(written(tmp_path / "floats", good, GOOD))
    assert [list(path) for path in trace.paths()] == [[0, 1], [0, 1]]
    ranges = {"timestamp": 1, "input_length": 1, "hash_ranges": [[0.0, 2.0]]}
    assert read_trace(written(tmp_path / "ranges", ranges)).unique_count == 3


def test_ids_may_be_of_any_size(tmp_path: Path) -> None:
    large = [GOOD | {"hash_ids": [2**200, 2**64, 2**64 - 1]}, GOOD | {"hash_ids": [2**200]}]
    assert read_trace(written(tmp_path / "large", *large)).unique_count == 3


def test_a_byte_order_mark_is_no_request(tmp_path: Path) -> None:
    path = tmp_path / "marked"
    path.write_text("\ufeff" + json.dumps(GOOD) + "\r\n", encoding="utf-8")
    assert read_trace(path).request_count == 1


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.sim.reader.LINE_CHARS_MAX", 200)
    path = tmp_path / "endless"
    path.write_text(json.dumps(GOOD) + "\n" + "x" * 100_000)
    with pytest.raises(ConfigError, match="line 2: too long; allowed: 200 characters"):
        read_trace(path)


def test_zstd_is_told_by_its_content(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain", GOOD, GOOD)
    packed = tmp_path / "packed"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    read: list[int] = []
    assert read_trace(packed, read.append).blocks == read_trace(plain).blocks
    assert sum(read) == packed.stat().st_size


def test_zstd_that_is_torn_is_an_error(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    data = zstandard.ZstdCompressor().compress(json.dumps(GOOD).encode() * 1000)
    packed.write_bytes(data[:8] + b"\xff" * 40)
    with pytest.raises(ConfigError, match="packed"):
        read_trace(packed)


def test_without_zstandard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(zstandard.ZstdCompressor().compress(b"{}"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"kvtier\[zstd\]"):
        read_trace(packed)


BAD: list[tuple[object, str]] = [
    ([1, 2], "not a JSON object"),
    ({key: value for key, value in GOOD.items() if key != "hash_ids"}, "'hash_ranges'"),
    ({key: value for key, value in GOOD.items() if key != "timestamp"}, "'timestamp'"),
    (GOOD | {"timestamp": -1}, "timestamp is -1"),
    (GOOD | {"timestamp": True}, "timestamp is true"),
    (GOOD | {"timestamp": float("inf")}, "timestamp is Infinity"),
    (GOOD | {"input_length": 1.5}, "input_length is 1.5"),
    (GOOD | {"timestamp": 1e300}, "timestamp is 1e+300"),
    (GOOD | {"timestamp": float("nan")}, "timestamp is NaN"),
    (GOOD | {"timestamp": "1"}, 'timestamp is "1"'),
    (GOOD | {"input_length": float("inf")}, "input_length is Infinity"),
    (GOOD | {"hash_ids": None}, "hash_ids is null"),
    (GOOD | {"hash_ids": [True]}, "hash_ids is"),
    (GOOD | {"hash_ids": "7"}, "hash_ids is"),
    (GOOD | {"hash_ids": [7, -1]}, "hash_ids is"),
    (GOOD | {"hash_ids": [7, 1.5]}, "hash_ids is"),
    ({"timestamp": 1, "input_length": 1, "hash_ranges": [[3, 2]]}, "hash_ranges is"),
    ({"timestamp": 1, "input_length": 1, "hash_ranges": [[0]]}, "hash_ranges is"),
    ({"timestamp": 1, "input_length": 1, "hash_ranges": [[0, 10**12]]}, "hash_ranges is"),
]
BAD_LOGGED: list[tuple[object, str]] = [
    (LOGGED | {"chunk_tokens": 128}, "chunk_tokens is 128"),
    (LOGGED | {"keys": [1]}, "keys is"),
    (LOGGED | {"hint": "maybe"}, "'will_continue'"),
    (LOGGED | {"turn": 0}, "turn is 0"),
    (GOOD, "no field"),
]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [(GOOD, *case) for case in BAD] + [(LOGGED, *case) for case in BAD_LOGGED],
)
def test_errors_name_file_line_and_what_is_allowed(
    tmp_path: Path, good: object, bad: object, message: str
) -> None:
    path = written(tmp_path / "trace.jsonl", good, bad)
    with pytest.raises(ConfigError, match="allowed: ") as caught:
        read_trace(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\xff\xfe\x00", b"{", b"\0\0", b"[" * 100_000, b'{"hash_ids":[' + b"9" * 5000],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_one_id_below_two_parents_is_two_blocks() -> None:
    """Ids that name blocks instead of prefixes are told apart by where they stand."""
    trace = traced([1, 5], [2, 5], [1, 5], [2, 5])
    assert [list(path) for path in trace.paths()] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_requests_are_in_order_of_time_and_never_at_one_instant() -> None:
    requests = [Request(2.0, [2], 16), Request(1.0, [1], 16), Request(1.0, [3], 16)]
    trace = make_trace(requests, 16)
    assert trace.times_s[0] == 1.0
    assert trace.times_s[0] < trace.times_s[1] < trace.times_s[2]
    assert [list(path) for path in trace.paths()] == [[0], [1], [2]]


def test_turns_count_how_often_a_path_went_on() -> None:
    trace = traced([1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 4, 5, 6])
    assert list(trace.turns) == [1, 2, 3, 1, 4]


def test_a_last_block_that_was_partly_filled_does_not_end_a_session() -> None:
    trace = traced([1, 2, 30], [1, 2, 3, 40], [1, 2, 3, 4, 50])
    assert list(trace.turns) == [1, 2, 3]


def test_a_common_prefix_is_no_session() -> None:
    """Its block ended a request once, but two branches had left from it before the last one."""
    trace = traced([1], [1, 20], [1, 30], [1, 40])
    assert trace.turns[1] == 2
    assert trace.turns[3] == 1


def test_hints_know_what_comes_and_are_wrong_as_often_as_asked() -> None:
    trace = traced([1, 2], [7], [1, 2, 3], [1, 2, 3, 4])
    going_on = HINTS.index(Hint.WILL_CONTINUE)
    done = HINTS.index(Hint.DONE)
    assert session_hints(trace, 1.0, seed=1) == [going_on, done, going_on, done]
    assert session_hints(trace, 0.0, seed=1) == [done, going_on, done, going_on]
    many = traced(*([block] for block in range(4000)))
    wrong = session_hints(many, 0.8, seed=1).count(going_on)
    assert 700 < wrong < 900
    assert session_hints(many, 0.8, seed=1) == session_hints(many, 0.8, seed=1)
    assert session_hints(many, 0.8, seed=1) != session_hints(many, 0.8, seed=2)
