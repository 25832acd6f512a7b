"""Commands, and their answers out of a stream of bytes: RESP2, payload into the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from redis import exceptions as redis_errors

from kvtier.constants import KIB, MIB
from kvtier_connectors.redis.errors import reply_error
from kvtier_connectors.redis.objects import HEADER_BYTES, INLINE_BYTES_MAX

#: No answer that is not read into a caller's buffer is larger.
ANSWER_BYTES_MAX: Final = HEADER_BYTES + INLINE_BYTES_MAX
_VALUE_BYTES_MAX: Final = 512 * MIB
BUFFER_BYTES: Final = 16 * KIB
_LINE_BYTES_MAX: Final = 4 * KIB
_DIGITS_MAX: Final = 18


class Command:
    """A command and where its answer goes.

    ``slot`` is the cluster's slot of its keys. Of a bulk answer the first ``head_bytes`` are
    returned and what follows goes ``into`` the caller's buffer as far as it reaches; without a
    buffer all of it is returned. When a command with the same ``job`` fails, the later ones are not
    sent any more, unless ``job`` is None. A redirection is no failure: the other keys of a slot
    that is on its way may still be here. ``payload_bytes`` is what it moves, either way.
    """

    __slots__ = ("head_bytes", "into", "job", "payload_bytes", "slot", "words")

    def __init__(
        self,
        words: tuple[bytes | memoryview, ...],
        slot: int,
        into: memoryview | None = None,
        head_bytes: int = ANSWER_BYTES_MAX,
        job: int | None = None,
    ) -> None:
        self.words, self.slot, self.job = words, slot, job
        self.into, self.head_bytes = into, head_bytes
        self.payload_bytes = 0 if into is None else len(into)
        for word in words:
            if isinstance(word, memoryview):
                self.payload_bytes += len(word)


class Bulk(NamedTuple):
    """A value that came: its first bytes, and how long it was."""

    head: bytes
    nbytes: int


Reply = Bulk | int | bytes | None | Exception

ASKING: Final = Command((b"ASKING",), 0)


class Replies:
    """Reads answers one by one. ``source`` fills some of a buffer; 0 is the end of the stream.

    Reads ahead at most ``BUFFER_BYTES``, so the bulk of a value never passes through a buffer.
    """

    def __init__(self, source: Callable[[memoryview], int]) -> None:
        self._source = source
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0

    @property
    def empty(self) -> bool:
        """True while nothing was read ahead."""
        return self._start == self._end

    def next(self, command: Command) -> Reply:
        """Return the next answer, which is to this command.

        An error reply is an answer. Raises ``InvalidResponse`` for what is not RESP, and
        ``ConnectionError`` where the stream ends.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return bytes(rest)
        if kind == b"-":
            return reply_error(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind == b":" and number is not None:
            return number
        if kind != b"$" or number is None or not -1 <= number <= _VALUE_BYTES_MAX:
            raise redis_errors.InvalidResponse(f"an answer that begins with {bytes(line[:20])!r}")
        return None if number == -1 else self._bulk(number, command)

    def _bulk(self, nbytes: int, command: Command) -> Bulk:
        head, rest, into = bytearray(), nbytes, command.into
        if command.head_bytes:
            head = bytearray(min(nbytes, command.head_bytes))
            self._fill(memoryview(head))
            rest -= len(head)
        if into is not None:
            placed = min(rest, len(into))
            self._fill(into[:placed])
            rest -= placed
        while rest:
            # More than was asked for: who asked sees it by the size.
            skipped = memoryview(bytearray(min(rest, BUFFER_BYTES)))
            self._fill(skipped)
            rest -= len(skipped)
        if self._line():
            raise redis_errors.InvalidResponse("a value that does not end where it should")
        return Bulk(bytes(head), nbytes)

    def _line(self) -> bytearray:
        while True:
            start = self._start
            end = self._bytes.find(b"\r\n", start, self._end)
            if end >= 0:
                self._start = end + 2
                return self._bytes[start:end]
            held = self._end - start
            if held > _LINE_BYTES_MAX:
                raise redis_errors.InvalidResponse("a line without an end")
            if held:
                self._buffer[:held] = bytes(self._buffer[start : self._end])
            self._start, self._end = 0, held
            self._end += self._receive(self._buffer[held:])

    def _fill(self, into: memoryview) -> None:
        """Fill the memory: first with what has come already, then straight from the socket."""
        wanted, start = len(into), self._start
        done = min(wanted, self._end - start)
        if done:
            into[:done] = self._buffer[start : start + done]
            self._start = start + done
        while done < wanted:
            done += self._receive(into[done:])

    def _receive(self, into: memoryview) -> int:
        count = self._source(into)
        if count == 0:
            raise redis_errors.ConnectionError("the server closed the connection")
        return count


def _number(text: bytearray) -> int | None:
    """Return a decimal number; None: it is none, or too long for one."""
    digits = text[1:] if text[:1] == b"-" else text
    return int(text) if digits.isdigit() and len(digits) <= _DIGITS_MAX else None
