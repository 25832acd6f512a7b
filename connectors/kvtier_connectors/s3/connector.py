"""The connector behind ``s3://``: pieces read at the same time, and versions that never mix."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Self, TypeVar

from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.s3.answers import Piece, Placed
from kvtier_connectors.s3.bucket import DELETES_MAX, KEY_BYTES_MAX, Bucket, Upload
from kvtier_connectors.s3.settings import Settings, parse_url
from kvtier_connectors.threads import Halt, Threads, call_s_max

#: A reader whose object is replaced again and again misses after so many tries.
READ_TRIES_MAX: Final = 3

Numbers = list[int]
Answer = Placed | ConnectorError | None
_Job = TypeVar("_Job")
_T = TypeVar("_T")


class S3Connector:
    """A ``Connector`` and ``Listable`` over a bucket.

    S3 shows an object whole or not at all, and a later GET sees what a PUT has stored. A range that
    is read in pieces comes from one version: pieces of two are read again. Writes are verified by
    the store, by CRC-32; reads by their length, and by the store's own sum where it gives one.

    For one event loop; boto3 is waited for in threads of our own. A cancelled call returns when its
    threads have let go of the buffers: at once where bytes flow, and after ``timeout_s`` where the
    store says nothing. It sends nothing any more.
    """

    def __init__(self, settings: Settings) -> None:
        """Does not connect yet."""
        self._bucket = Bucket(settings)
        self._settings = settings
        self._threads = Threads(settings.connections, "kvtier-s3")

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``s3://bucket/prefix?region=…``; the guide lists all options."""
        return cls(parse_url(url))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which objects are there; a fault is no."""
        found = await self._each(lambda key, _: self._bucket.contains(key), keys)
        return [outcome is True for outcome in found]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        outcomes: list[ReadOutcome] = [None] * len(requests)
        todo = list(range(len(requests)))
        for _ in range(READ_TRIES_MAX):
            piece_bytes = self._settings.piece_bytes
            pieces = [_pieces(requests[n], into[n], piece_bytes) for n in todo]
            flat = [piece for own in pieces for piece in own]
            nbytes = sum(requests[n].nbytes for n in todo)
            answers = iter(await self._each(self._bucket.read, flat, nbytes))
            again = []
            for n, own in zip(todo, pieces, strict=True):
                placed = [next(answers) for _ in own]
                outcomes[n] = _outcome(own, placed)
                if _is_mixed(placed):
                    again.append(n)
            todo = again
            if not todo:
                break
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Store objects: small ones in one go, large ones in parts at the same time."""
        outcomes: list[ConnectorError | None] = [None] * len(items)
        small: Numbers = []
        large: Numbers = []
        for n, item in enumerate(items):
            if len(item.key) > KEY_BYTES_MAX:
                outcomes[n] = ConnectorRefusedError(f"a key of {len(item.key)} bytes")
            else:
                (large if item.data.nbytes > self._settings.multipart_bytes else small).append(n)
        written = await self._each(
            lambda item, _: self._bucket.write(item.key, item.data),
            [items[n] for n in small],
            sum(items[n].data.nbytes for n in small),
        )
        for n, outcome in zip(small, written, strict=True):
            outcomes[n] = outcome
        for n in large:
            outcomes[n] = await self._write_parts(items[n])
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete in large batches; what cannot be deleted stays."""
        starts = range(0, len(keys), DELETES_MAX)
        batches = [list(keys[start : start + DELETES_MAX]) for start in starts]
        await self._each(lambda batch, _: self._bucket.delete(batch), batches)

    async def close(self) -> None:
        """Close the connections; what runs is finished."""
        self._threads.close()
        self._bucket.close()

    async def _write_parts(self, item: WriteItem) -> ConnectorError | None:
        (upload_id,) = await self._each(lambda key, _: self._bucket.begin_upload(key), [item.key])
        if not isinstance(upload_id, str):
            return upload_id
        try:
            problem = await self._send_parts(item, upload_id)
        except asyncio.CancelledError:
            # Nobody waits for it: it needs none of the caller's memory.
            if not self._threads.refusal(1):
                with contextlib.suppress(ConnectorUnavailableError):
                    self._threads.executor.submit(self._bucket.abort_upload, item.key, upload_id)
            raise
        if problem is not None:
            await self._each(
                lambda upload, _: self._bucket.abort_upload(item.key, upload), [upload_id]
            )
        return problem

    async def _send_parts(self, item: WriteItem, upload_id: str) -> ConnectorError | None:
        data, part_bytes = item.data.cast("B"), self._settings.part_bytes
        uploads = [
            Upload(item.key, upload_id, number, data[start : start + part_bytes])
            for number, start in enumerate(range(0, data.nbytes, part_bytes), 1)
        ]
        parts = await self._each(
            lambda upload, _: self._bucket.send_part(upload), uploads, data.nbytes
        )
        sent = [part for part in parts if not isinstance(part, ConnectorError)]
        problem = next((part for part in parts if isinstance(part, ConnectorError)), None)
        if problem is None:
            (problem,) = await self._each(
                lambda upload, _: self._bucket.end_upload(item.key, upload, sent), [upload_id]
            )
        return problem

    async def _each(
        self, function: Callable[[_Job, Halt], _T], jobs: Sequence[_Job], nbytes: int = 0
    ) -> list[_T | ConnectorError]:
        """Do the jobs; what takes much longer than so many bytes may is given up."""

        def run(job: _Job, halt: Halt) -> _T:
            with self._bucket.unless(halt):
                return function(job, halt)

        settings = self._settings
        turns = -(-len(jobs) // settings.connections)  # One after the other, each with its tries.
        silence_s = turns * settings.tries * (settings.connect_timeout_s + settings.timeout_s)
        limit_s = call_s_max(silence_s, nbytes)
        return await self._threads.each(run, jobs, shares_max=settings.connections, limit_s=limit_s)

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """List everything under the prefix of the URL, page by page.

        Raises ``ConnectorError`` where a page cannot be read.
        """
        token: str | None = None
        while True:
            (page,) = await self._each(lambda at, _: self._bucket.page(prefix, at), [token])
            if isinstance(page, ConnectorError):
                raise page
            infos, token = page
            for info in infos:
                yield info
            if token is None:
                break


def _pieces(request: ReadRequest, into: memoryview, piece_bytes: int) -> Sequence[Piece]:
    starts = range(0, max(1, request.nbytes), piece_bytes)
    return [
        Piece(request.key, request.offset + start, into[start : start + piece_bytes])
        for start in starts
    ]


def _is_mixed(answers: Sequence[Answer]) -> bool:
    """Tell whether the pieces come from more than one version, or from one that has gone."""
    if any(isinstance(answer, ConnectorError) for answer in answers):
        return False
    versions = {answer.etag if isinstance(answer, Placed) else None for answer in answers}
    # Behind the end there is nothing whose version would be told.
    return len(versions - {""}) > 1


def _outcome(pieces: Sequence[Piece], answers: Sequence[Answer]) -> ReadOutcome:
    if _is_mixed(answers):
        return None
    come = [answer for answer in answers if isinstance(answer, Placed) and answer.nbytes]
    if len(come) > 1 and not all(answer.etag for answer in come):
        return ConnectorDataError("the store names no version (ETag) that pieces could be told by")
    total = 0
    for piece, answer in zip(pieces, answers, strict=True):
        if answer is None or isinstance(answer, ConnectorError):
            return answer
        total += answer.nbytes
        if answer.nbytes < len(piece.into):
            break
    else:
        return total
    rest = answers[answers.index(answer) + 1 :]
    if any(isinstance(each, Placed) and each.nbytes for each in rest):
        return ConnectorDataError("pieces of an object that do not fit together")
    return total
