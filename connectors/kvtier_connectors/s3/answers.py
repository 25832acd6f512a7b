"""Taking in what S3 answers to a GET: into the caller's memory, and of one version only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kvtier.constants import MIB
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier_connectors.s3.errors import MET, translated
from kvtier_connectors.threads import Halt

#: What is read at once; after that we look whether anybody still wants it.
STEP_BYTES: Final = MIB
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Piece(NamedTuple):
    """A range of an object, and the memory for it."""

    key: bytes
    offset: int
    into: memoryview


class Placed(NamedTuple):
    """How much of a piece came; which version of the object it is from, and how large that is."""

    nbytes: int
    etag: str
    object_bytes: int

    def fills(self, piece: Piece) -> bool:
        """Tell whether that is all there is of the piece."""
        return self.nbytes >= min(self.object_bytes - piece.offset, len(piece.into))


#: Nothing of any version, yet.
NOTHING: Final = Placed(0, "", 1 << 63)


def field(answer: Mapping[str, Any], name: str) -> Any:
    """Return what an answer must have. Raises ``ConnectorDataError``."""
    if name not in answer:
        raise ConnectorDataError(f"the store answered without {name}")
    return answer[name]


def take_in(
    answer: Mapping[str, Any], piece: Piece, placed: Placed, halt: Halt
) -> tuple[Placed, ConnectorError]:
    """Take in an answer to a GET of the rest of a piece, of which ``placed`` has come.

    Returns how far the piece has come, and what to say if that is all. An answer of another version
    than what had come begins the piece anew. Raises ``ConnectorDataError`` for another range.
    """
    body = answer["Body"]
    try:
        etag, start = str(answer.get("ETag", "")), piece.offset + placed.nbytes
        size = _object_bytes(answer, start)
        if placed.nbytes and etag != placed.etag:
            return NOTHING, ConnectorUnavailableError("an object that changes while it is read")
        end = min(size - piece.offset, len(piece.into))
        done, problem = _fill(body, piece.into[placed.nbytes : end], halt)
        if done == size and problem is None:
            problem = _verify(body)
    finally:
        body.close()
    if isinstance(problem, ConnectorDataError):
        raise problem
    problem = problem or ConnectorUnavailableError("an answer that ended too early")
    # Without a version there is no telling what an answer could be gone on with.
    come = Placed(placed.nbytes + done, etag, size)
    return (come if etag or come.fills(piece) else NOTHING), problem


def _fill(body: Any, into: memoryview, halt: Halt) -> tuple[int, ConnectorError | None]:
    """Read until the memory is full; return how much came, and what went wrong."""
    stop, done = _stopper(body), 0
    halt.when_set(stop)
    try:
        while done < len(into) and not halt.is_set():
            count = body.readinto(into[done : done + STEP_BYTES])
            if count == 0:
                break
            done += count
    except MET as error:
        return done, translated(error)
    finally:
        halt.forget(stop)
    return done, None


def _stopper(body: Any) -> Callable[[], None]:
    """Return what makes a read of the body end now, from any thread."""

    def stop() -> None:
        # Older versions of urllib3 cannot do it: their reads end with their time-out.
        with suppress(AttributeError, RuntimeError, ValueError, OSError):
            body._raw_stream.shutdown()  # noqa: SLF001 - botocore shows it nowhere else.

    return stop


def _verify(body: Any) -> ConnectorError | None:
    """At the end of a whole object, let botocore compare it with the store's sum, if it gave one.

    It does so when there is nothing more to read.
    """
    try:
        body.readinto(memoryview(bytearray(1)))
    except MET as error:
        return translated(error)
    return None


def _object_bytes(answer: Mapping[str, Any], start: int) -> int:
    """Return the size of the whole object, of which this answer begins where it should."""
    match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if match and int(match[1]) == start:
        return int(match[3])
    if not match and start == 0:
        return int(field(answer, "ContentLength"))
    raise ConnectorDataError("the store answered with another range than was asked for")
