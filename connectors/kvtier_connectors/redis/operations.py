"""What is asked of Redis for each call: objects as headers and parts, in few turns. Blocks."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis import exceptions as redis_errors

from kvtier.errors import ConnectorDataError, ConnectorError
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.redis.errors import translated
from kvtier_connectors.redis.known import Known
from kvtier_connectors.redis.link import redis_expected
from kvtier_connectors.redis.objects import (
    GENERATION_BYTES,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    PART_BYTES,
    Header,
    decode_header,
    encode_header,
    key_of,
    object_name,
    part_name,
    part_names,
    part_ranges,
)
from kvtier_connectors.redis.replies import Bulk, Command, Reply
from kvtier_connectors.redis.settings import Node, Settings
from kvtier_connectors.redis.topology import Topology, client_of

Run = Callable[[Sequence[Command]], list[Reply]]

#: A reader whose object is replaced again and again misses after so many tries.
READ_TRIES_MAX: Final = 3
#: Parts whose header is not written yet, because their writer died, go after so long.
PENDING_S: Final = 600
SCAN_COUNT: Final = 1000

# Deletes a header that promises parts which are gone, unless somebody has written a new one.
_DELETE_IF_SAME: Final = (
    b"if redis.call('GETRANGE', KEYS[1], 0, -1) == ARGV[1] "
    b"then return redis.call('UNLINK', KEYS[1]) end return 0"
)


class Operations:
    """The calls of a connector, over something that runs commands. One object for each call.

    From begin to end in one thread: a turn costs no more than the way to the server. What goes
    wrong in the store is an outcome; only listings raise it, as ``ConnectorError``.
    """

    def __init__(self, settings: Settings, topology: Topology, known: Known, run: Run) -> None:
        self._settings = settings
        self._topology = topology
        self._known = known
        self._run = run
        self._places: dict[bytes, tuple[bytes, int]] = {}

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell whose header is there; a fault is no."""
        replies = self._run([self._command(key, b"EXISTS") for key in keys])
        return [reply == 1 for reply in replies]

    def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        outcomes: list[ReadOutcome] = [None] * len(requests)
        seen: dict[int, Header] = {}
        todo = self._read_known(requests, into, outcomes)
        for _ in range(READ_TRIES_MAX if todo else 0):
            headers = self._read_headers(todo, requests, into, outcomes)
            # The same header twice, and parts of it gone twice: they do not come back.
            lasting = {n: header for n, header in headers.items() if seen.get(n) != header}
            self._forget({n: headers[n] for n in headers.keys() - lasting.keys()}, requests)
            seen = lasting
            commands, owners = self._parts(lasting, requests, into)
            todo = self._taken(owners, self._run(commands), lasting, requests, outcomes)
            if not todo:
                break
        return outcomes

    def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write all parts, then the headers, then clear up what the headers replaced."""
        headers = [self._new_header(item.data.nbytes) for item in items]
        outcomes: list[ConnectorError | None] = [None] * len(items)
        self._write_parts(items, headers, outcomes)
        going = [n for n, outcome in enumerate(outcomes) if outcome is None]
        commits = [self._commit(items[n], headers[n], n) for n in going]
        replies = iter(self._run([command for commit in commits for command in commit]))
        after: list[Command] = []
        for n, commit in zip(going, commits, strict=True):
            key, (reply, *_) = items[n].key, itertools.islice(replies, len(commit))
            outcomes[n], old = _failure(reply), _old_header(reply)
            if outcomes[n] is None and old is not None and old.generation != headers[n].generation:
                after += self._unlink(key, old)
            elif isinstance(reply, redis_errors.ResponseError):
                after += self._unlink(key, headers[n])
            if outcomes[n] is None and headers[n].part_bytes:
                self._known.learn(key, headers[n])
        self._run(after)
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the headers, then their parts."""
        replies = self._run([self._command(key, b"GETDEL") for key in keys])
        after: list[Command] = []
        for key, reply in zip(keys, replies, strict=True):
            self._known.forget(key)
            if header := _old_header(reply):
                after += self._unlink(key, header)
        self._run(after)

    def _command(
        self,
        key: bytes,
        verb: bytes,
        *words: bytes | memoryview,
        name: bytes | None = None,
        into: memoryview | None = None,
        head_bytes: int = HEADER_BYTES + INLINE_BYTES_MAX,
        job: int | None = None,
    ) -> Command:
        """Return a command on the object's header, or on the name given."""
        own, slot = self._place(key)
        return Command((verb, name or own, *words), slot, into, head_bytes, job)

    def _place(self, key: bytes) -> tuple[bytes, int]:
        """Return the name of an object's header, and its slot."""
        place = self._places.get(key)
        if place is None:
            name = object_name(self._settings.prefix, key)
            place = self._places[key] = name, self._topology.slot_of(name)
        return place

    def _read_known(
        self,
        requests: Sequence[ReadRequest],
        into: Sequence[memoryview],
        outcomes: list[ReadOutcome],
    ) -> list[int]:
        """Read by headers that we have met, if we have all; return what is to be read otherwise.

        Whether they still hold is asked together with the parts, so it takes one turn, not two.
        """
        found = ((n, self._known.find(request.key)) for n, request in enumerate(requests))
        headers = {n: header for n, header in found if header is not None}
        if len(headers) < len(requests):
            return list(range(len(requests)))
        commands, owners = self._parts(headers, requests, into)
        whole = (b"0", b"%d" % (HEADER_BYTES - 1))
        checks = [self._command(request.key, b"GETRANGE", *whole) for request in requests]
        replies = self._run([*checks, *commands])
        self._taken(owners, replies[len(checks) :], headers, requests, outcomes)
        todo: list[int] = []
        for n, reply in enumerate(replies[: len(checks)]):
            if not isinstance(reply, Bulk):
                outcomes[n] = _failure(reply) or _unexpected(reply)
            elif outcomes[n] is None or reply.head != encode_header(headers[n]):
                self._known.forget(requests[n].key)
                todo.append(n)
        return todo

    def _read_headers(
        self,
        todo: Sequence[int],
        requests: Sequence[ReadRequest],
        into: Sequence[memoryview],
        outcomes: list[ReadOutcome],
    ) -> dict[int, Header]:
        """Read headers, with the data of small objects; return the headers of the large ones."""
        commands = []
        for n in todo:
            key, offset, nbytes = requests[n].key, requests[n].offset, requests[n].nbytes
            last = HEADER_BYTES + min(offset + nbytes, INLINE_BYTES_MAX) - 1
            skipped = HEADER_BYTES + min(offset, INLINE_BYTES_MAX)
            span = (b"0", b"%d" % last)
            # No more than a header brings, or many connections would be used for a few bytes.
            buffer = into[n][:INLINE_BYTES_MAX]
            commands.append(self._command(key, b"GETRANGE", *span, into=buffer, head_bytes=skipped))
        headers: dict[int, Header] = {}
        for n, reply in zip(todo, self._run(commands), strict=True):
            outcomes[n] = None
            if not isinstance(reply, Bulk):
                outcomes[n] = _failure(reply) or _unexpected(reply)
            elif reply.nbytes:
                try:
                    header = decode_header(reply.head)
                except ConnectorDataError as error:
                    outcomes[n] = error.with_traceback(None)
                    continue
                if header.part_bytes:
                    headers[n] = header
                else:
                    outcomes[n] = _inline_outcome(header, requests[n], reply.nbytes)
        return headers

    def _parts(
        self,
        headers: dict[int, Header],
        requests: Sequence[ReadRequest],
        into: Sequence[memoryview],
    ) -> tuple[list[Command], list[tuple[int, int]]]:
        """Return what reads the parts that headers name, and of which request how much each is."""
        commands: list[Command] = []
        owners: list[tuple[int, int]] = []
        for n, header in headers.items():
            request = requests[n]
            name, _ = self._place(request.key)
            for part in part_ranges(header, request.offset, request.nbytes):
                size = part.stop - part.start
                span = () if part.is_whole else (b"%d" % part.start, b"%d" % (part.stop - 1))
                commands.append(
                    self._command(
                        request.key,
                        b"GET" if part.is_whole else b"GETRANGE",
                        *span,
                        name=part_name(name, header.generation, part.number),
                        into=into[n][part.target : part.target + size],
                        head_bytes=0,
                        job=n,
                    )
                )
                owners.append((n, size))
        return commands, owners

    def _taken(
        self,
        owners: Sequence[tuple[int, int]],
        replies: Sequence[Reply],
        headers: dict[int, Header],
        requests: Sequence[ReadRequest],
        outcomes: list[ReadOutcome],
    ) -> list[int]:
        """Tell what became of requests; return those whose parts are not all there (any more)."""
        for n, header in headers.items():
            outcomes[n] = max(0, min(requests[n].nbytes, header.nbytes - requests[n].offset))
        missing: set[int] = set()
        for (n, size), reply in zip(owners, replies, strict=True):
            if reply is None or (isinstance(reply, Bulk) and reply.nbytes == 0):
                missing.add(n)
            elif not isinstance(reply, Bulk):
                outcomes[n] = _failure(reply) or _unexpected(reply)
            elif reply.nbytes != size:
                outcomes[n] = ConnectorDataError(f"a part of {reply.nbytes} bytes, not {size}")
        again = [n for n in missing if isinstance(outcomes[n], int)]
        for n in again:
            outcomes[n] = None
        for n, header in headers.items():
            if isinstance(outcomes[n], int):
                self._known.learn(requests[n].key, header)
        return again

    def _forget(self, headers: dict[int, Header], requests: Sequence[ReadRequest]) -> None:
        """Delete headers whose parts are gone, so that lookups do not find them any more."""
        commands: list[Command] = []
        for n, header in headers.items():
            key = requests[n].key
            name, slot = self._place(key)
            words = (b"EVAL", _DELETE_IF_SAME, b"1", name, encode_header(header))
            commands.append(Command(words, slot))
            commands += self._unlink(key, header)
        self._run(commands)

    def _new_header(self, nbytes: int) -> Header:
        if nbytes <= INLINE_BYTES_MAX:
            return Header(nbytes, 0, bytes(GENERATION_BYTES))
        return Header(nbytes, PART_BYTES, secrets.token_bytes(GENERATION_BYTES))

    def _write_parts(
        self,
        items: Sequence[WriteItem],
        headers: Sequence[Header],
        outcomes: list[ConnectorError | None],
    ) -> None:
        """Write the parts of large objects; those of an object that fails are deleted again."""
        commands: list[Command] = []
        owners: list[int] = []
        expiry = b"%d" % (PENDING_S + (self._settings.ttl_s or 0))
        for n, (item, header) in enumerate(zip(items, headers, strict=True)):
            data = item.data.cast("B")
            name, _ = self._place(item.key)
            for index, part in enumerate(part_names(name, header)):
                piece = data[index * PART_BYTES : (index + 1) * PART_BYTES]
                words = (piece, b"EX", expiry)
                commands.append(self._command(item.key, b"SET", *words, name=part, job=n))
                owners.append(n)
        after: list[Command] = []
        for n, reply in zip(owners, self._run(commands), strict=True):
            failure = _failure(reply)
            if failure and outcomes[n] is None:
                outcomes[n] = failure
                after += self._unlink(items[n].key, headers[n])
        self._run(after)

    def _commit(self, item: WriteItem, header: Header, job: int) -> list[Command]:
        """Return what makes an object the one that is found, gives the old one, and what lasts.

        They go together. Where the server refuses the header its parts may last, too, until they
        are deleted, which is the next thing that we do.
        """
        value = encode_header(header)
        if not header.part_bytes:
            value += item.data
        expiry = (b"EX", b"%d" % self._settings.ttl_s) if self._settings.ttl_s else ()
        commands = [self._command(item.key, b"SET", value, *expiry, b"GET", job=job)]
        if self._settings.ttl_s is None:
            name, slot = self._place(item.key)
            commands += [
                Command((b"PERSIST", part), slot, job=job) for part in part_names(name, header)
            ]
        return commands

    def _unlink(self, key: bytes, header: Header) -> list[Command]:
        # One by one: while a slot moves, a command over keys of both nodes is refused.
        names = part_names(self._place(key)[0], header)
        return [self._command(key, b"UNLINK", name=name) for name in names]

    def listed(self, node: Node, cursor: int, prefix: bytes) -> tuple[int, list[KeyInfo]]:
        """Do one step of a scan of a node; return the next cursor, 0 at the end."""
        cursor, names = self._scan(node, cursor, prefix)
        keys = [key_of(self._settings.prefix, name) for name in names]
        return cursor, self._infos([key for key in keys if key is not None])

    def _infos(self, keys: Sequence[bytes]) -> list[KeyInfo]:
        last = b"%d" % (HEADER_BYTES - 1)
        commands = [self._command(key, b"GETRANGE", b"0", last) for key in keys]
        infos = []
        for key, reply in zip(keys, self._run(commands), strict=True):
            # What others have put under a name like ours is passed over, of whatever type.
            if isinstance(reply, redis_errors.DataError):
                continue
            if failure := _failure(reply):
                raise failure
            if isinstance(reply, Bulk):
                with contextlib.suppress(ConnectorDataError):
                    infos.append(KeyInfo(key, decode_header(reply.head).nbytes))
        return infos

    def _scan(self, node: Node, cursor: int, prefix: bytes) -> tuple[int, Sequence[bytes]]:
        beginning = object_name(self._settings.prefix, prefix)[:-1] if prefix else None
        pattern = _glob(beginning or self._settings.prefix + b"{") + b"*}"
        try:
            with redis_expected(), client_of(self._settings, node) as client:
                answer: Any = client.scan(cursor, pattern, SCAN_COUNT)
                return int(answer[0]), [name for name in answer[1] if isinstance(name, bytes)]
        except (redis_errors.RedisError, OSError) as error:
            raise translated(error) from error


def _glob(text: bytes) -> bytes:
    """Return a pattern that only this text matches."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in text)


def _failure(reply: Reply) -> ConnectorError | None:
    if isinstance(reply, ConnectorError):
        return reply
    return translated(reply) if isinstance(reply, Exception) else None


def _unexpected(reply: Reply) -> ConnectorDataError:
    return ConnectorDataError(f"an answer of another kind: {type(reply).__name__}")


def _old_header(reply: Reply) -> Header | None:
    """Return the header that a command replaced or removed, if it was one."""
    if not isinstance(reply, Bulk):
        return None
    try:
        return decode_header(reply.head)
    except ConnectorDataError:
        return None


def _inline_outcome(header: Header, request: ReadRequest, came_bytes: int) -> ReadOutcome:
    """Return how much of the range came with a header, if it is all that the header promises."""
    there = max(0, min(request.nbytes, header.nbytes - request.offset))
    end = min(request.offset + request.nbytes, header.nbytes)
    if came_bytes != HEADER_BYTES + end:
        return ConnectorDataError(f"a value of {came_bytes} bytes where {end} belong")
    return there
