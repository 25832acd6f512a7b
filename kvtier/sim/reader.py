"""Trace files to requests: Mooncake's JSON lines and KVTier's own access log, plain or zstd.

Every line is one request. What is wrong names the file, the line and what is allowed there.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from kvtier.errors import ConfigError
from kvtier.obs.access_log import Field
from kvtier.registry import import_problem
from kvtier.sim.trace import Request, Trace, make_trace
from kvtier.types import Hint

#: Tokens per hash id in Mooncake's traces.
MOONCAKE_BLOCK_TOKENS: Final = 512
BLOCKS_PER_REQUEST_MAX: Final = 1_000_000
#: Milliseconds, seconds and tokens beyond this are a mistake.
NUMBER_MAX: Final = 2**53
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: A longer line is no request but a file that is no trace.
LINE_CHARS_MAX: Final = 64 * 2**20
_TEXT_SHOWN_MAX: Final = 60

Value = TypeVar("Value")


class _Line:
    """One line of a trace, as an object whose fields are checked when they are asked for."""

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:  # Also numbers of thousands of digits.
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise self.problem(f"not JSON: {message}", "one JSON object per line") from None
        if not isinstance(value, dict):
            raise self.problem("not a JSON object", "one JSON object per line")
        self._fields: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def problem(self, what: str, allowed: str) -> ConfigError:
        """Return the error to raise."""
        return ConfigError(f"{self._where}: {what}; allowed: {allowed}")

    def field(self, name: str, parse: Callable[[Any], Value | None], allowed: str) -> Value:
        """Return a field that must be there. ``parse`` returns None for what is not allowed."""
        if name not in self._fields:
            raise self.problem(f"no field {name!r}", f"{name!r}: {allowed}")
        raw = self._fields[name]
        parsed = parse(raw)
        if parsed is None:
            text = json.dumps(raw)
            shown = text if len(text) <= _TEXT_SHOWN_MAX else text[:_TEXT_SHOWN_MAX] + "…"
            raise self.problem(f"{name} is {shown}", allowed)
        return parsed


def read_trace(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Trace:
    """Read a file. ``on_bytes`` is told now and then how many bytes of it have been read since.

    Raises ``ConfigError`` for a file that is none, ``MissingExtraError`` for a compressed one
    where zstandard is not installed.
    """
    requests: list[Request] = []
    block_tokens: int | None = None
    parse: Callable[[_Line], Request] = _mooncake_request
    with _opened(path, on_bytes) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            if len(text) > LINE_CHARS_MAX:
                raise ConfigError(f"{where}: too long; allowed: {LINE_CHARS_MAX} characters")
            line = _Line(where, text)
            if block_tokens is None and Field.KEYS in line:
                parse = _logged_request
            tokens = MOONCAKE_BLOCK_TOKENS
            if parse is _logged_request:
                tokens = line.field(Field.CHUNK_TOKENS, _count, "a whole number above 0")
            if block_tokens not in {None, tokens}:
                raise line.problem(f"chunk_tokens is {tokens}", f"{block_tokens}, as before")
            block_tokens = tokens
            requests.append(parse(line))
    if block_tokens is None:
        raise ConfigError(f"{path}: no request; allowed: one JSON object per line")
    return make_trace(requests, block_tokens)


def _mooncake_request(line: _Line) -> Request:
    if "hash_ids" in line:
        blocks = line.field("hash_ids", _ids, "a list of whole numbers from 0")
    elif "hash_ranges" in line:
        blocks = line.field(
            "hash_ranges", _ranges, "a list of [first, last] with 0 <= first <= last"
        )
    else:
        raise line.problem(
            "no blocks", "'hash_ids' or 'hash_ranges' (Mooncake), or 'keys' (access log)"
        )
    time_ms = line.field("timestamp", _number, "milliseconds, a number from 0")
    tokens = line.field("input_length", _count, "a whole number above 0")
    return Request(time_ms / 1000.0, blocks, tokens)


def _logged_request(line: _Line) -> Request:
    return Request(
        line.field(Field.TIME, _number, "seconds, a number from 0"),
        line.field(Field.KEYS, _texts, "a list of texts"),
        line.field(Field.PROMPT_TOKENS, _count, "a whole number above 0"),
        line.field(Field.TURN, _count, "a whole number above 0"),
        line.field(Field.HINT, _hint, ", ".join(map(repr, _HINTS))),
    )


def _whole(value: Any) -> int | None:
    """Return a whole number, also one that was written as 7.0, and None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and 0 <= value <= NUMBER_MAX else None


def _count(value: Any) -> int | None:
    whole = _whole(value)
    return whole if whole is not None and 0 < whole <= NUMBER_MAX else None


def _ids(value: Any) -> Sequence[int] | None:
    if not isinstance(value, list) or len(value) > BLOCKS_PER_REQUEST_MAX:
        return None
    if not all(type(each) is int for each in value):
        wholes = list(map(_whole, value))
        value = [each for each in wholes if each is not None]
        if len(value) != len(wholes):
            return None
    if value and min(value) < 0:
        return None
    # Flat where it can be: a list of a million numbers weighs four times as much.
    return array("Q", value) if not value or max(value) < 2**64 else value


def _ranges(value: Any) -> Sequence[int] | None:
    if not isinstance(value, list):
        return None
    blocks = array("Q")
    for each in value:
        if not isinstance(each, list) or len(each) != 2:
            return None
        first, last = map(_whole, each)
        if first is None or last is None or not 0 <= first <= last < 2**63:
            return None
        if len(blocks) + last - first >= BLOCKS_PER_REQUEST_MAX:
            return None
        blocks.extend(range(first, last + 1))
    return blocks


def _texts(value: Any) -> list[str] | None:
    if not isinstance(value, list) or len(value) > BLOCKS_PER_REQUEST_MAX:
        return None
    return value if all(isinstance(each, str) for each in value) else None


_HINTS: Final = {hint.value: hint for hint in Hint}


def _hint(value: Any) -> Hint | None:
    return _HINTS.get(value) if isinstance(value, str) else None


class _Counted(io.RawIOBase):
    """A raw file that says how much of it was read."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._on_bytes = on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._on_bytes(len(data))
        return len(data)


@contextmanager
def _opened(path: Path, on_bytes: Callable[[int], None]) -> Iterator[Iterator[str]]:
    faults: tuple[type[Exception], ...] = (OSError, UnicodeDecodeError)
    try:
        with path.open("rb") as file:
            is_zstd = file.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
            file.seek(0)
            raw: Any = io.BufferedReader(_Counted(file, on_bytes))
            if is_zstd:
                zstandard = _zstandard()
                faults = (*faults, zstandard.ZstdError)
                raw = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            lines = io.TextIOWrapper(raw, encoding="utf-8-sig")
            yield iter(lambda: lines.readline(LINE_CHARS_MAX + 1), "")
    except faults as error:
        raise ConfigError(f"{path}: {error}; allowed: a readable file of JSON lines") from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise import_problem(error, "a .zst trace") from error
    return zstandard
