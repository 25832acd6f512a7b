"""``Encrypted``: what the store holds can be read, changed or swapped by nobody without the key.

::

    name      8 bytes that the encryption key decides · the object's key
    header    magic "KVTE" · version 1 · 3 zero bytes · object id 16 · nbytes u64      (32 bytes)
    segment   nonce 12 · ciphertext of at most 256 KiB · tag 16                        (one or more)

AES-256-GCM (NIST SP 800-38D). Each segment is bound to the object's key, id and size and to its own
number by the associated data, so a segment of another object, another write or another place is
refused, as is an object that was cut. Segments let a range be read without the rest.

Those who have different keys and one store never meet in it: one would only find that the other's
objects are not its own, write its own over them, and be written over in its turn.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self
from urllib.parse import parse_qsl, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier.config import reject_unknown
from kvtier.constants import KIB
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
    nearest,
)
from kvtier.interfaces import Connector, Listable, ReadOutcome
from kvtier.registry import connect
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.decorators.base import Decorator
from kvtier_connectors.threads import Halt, Threads

SEGMENT_BYTES: Final = 256 * KIB
KEY_BYTES: Final = 32
OBJECT_BYTES_MAX: Final = 1 << 40
#: What the name of an object begins with: two keys have the same by a chance of 2**-64.
NAME_BYTES: Final = 8
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
#: A reader whose object is replaced between its header and its segments tries so often.
TRIES_MAX: Final = 3
THREADS_DEFAULT: Final = 2

#: What our own options of a URL begin with, and the one that there is.
_OPTIONS: Final = "encryption_"
KEY_FILE: Final = "encryption_key_file"

_HEADER: Final = struct.Struct(">4sB3x16sQ")
_MAGIC: Final = b"KVTE"
_VERSION: Final = 1
_EXTRA_BYTES: Final = NONCE_BYTES + TAG_BYTES
# A pseudo-random function of the key (RFC 2104) under a label of its own tells nothing of it.
_NAME_LABEL: Final = b"kvtier names of encrypted objects 1"


class Keys(Protocol):
    """Where keys come from. Asked at every call, so a key that is taken away is gone at once."""

    def key(self, tenant: str) -> bytes | None:
        """Return the 32 bytes of a tenant, None if it has none (any more). Does not block."""
        ...


class FileKey:
    """The key in a file, for everybody: 64 hexadecimal digits, as ``openssl rand -hex 32`` writes.

    The file is read once; whoever shall forget the key has to be started anew.
    """

    def __init__(self, path: str) -> None:
        """Read it. Raises ``ConfigError``, which does not show what the file holds."""
        try:
            text = Path(path).read_bytes()[: 4 * KEY_BYTES].strip()
        except OSError as error:
            raise ConfigError(f"{KEY_FILE} {path}: {error.strerror or error}") from error
        try:
            self._key = bytes.fromhex(text.decode())
        except ValueError:
            self._key = b""
        if len(self._key) != KEY_BYTES:
            raise ConfigError(f"{KEY_FILE} {path}: allowed are {2 * KEY_BYTES} hexadecimal digits")

    def key(self, tenant: str) -> bytes:
        """See ``Keys``."""
        del tenant
        return self._key


class _Header(NamedTuple):
    object_id: bytes
    nbytes: int


class _Secret(NamedTuple):
    """What a key does: it encrypts, and decides what names begin with."""

    cipher: AESGCM
    prefix: bytes


class Encrypted(Decorator):
    """Encrypts what is written and authenticates what is read, with the key of one tenant.

    Other bytes are ``ConnectorDataError``; what was written with another key is a miss. Without a
    key all is a miss and writes are refused: who deletes a tenant's key has deleted its KV. The
    store still sees sizes, the keys of objects, which of them one key is for and who asks for what,
    and it can forget an object or give an older one of the same key. Keys get 8 bytes longer.

    A nonce is 96 random bits; NIST allows 2**32 of them per key, which is 1 PiB written. A read
    takes two turns, for the header and for the segments. Needs ``cryptography``.
    """

    def __init__(
        self, inner: Connector, keys: Keys, tenant: str, *, threads: int = THREADS_DEFAULT
    ) -> None:
        """Wrap ``inner``; encryption runs in threads of its own."""
        super().__init__(inner)
        self._keys = keys
        self._tenant = tenant
        self._prefix: bytes | None = None
        self._threads = Threads(threads, "kvtier-encrypt")
        if isinstance(inner, Listable):
            vars(self)["list"] = self._list

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``encrypted+redis://host?encryption_key_file=/etc/kv/key``; the rest is the store's.

        There is one key for all, and so no tenant by name.
        """
        inner, key_file = _taken_apart(url)
        keys = FileKey(key_file)
        return cls(connect(inner), keys, "")

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask, if there is a key that could read it."""
        secret = self._secret()
        if secret is None:
            return [False for _ in keys]
        return await super().contains([secret.prefix + key for key in keys])

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read the segments of each range, and decrypt them into the buffers."""
        outcomes: list[ReadOutcome] = [None for _ in requests]
        secret = self._secret()
        if secret is None:
            return outcomes
        seen: dict[int, _Header] = {}
        todo = list(range(len(requests)))
        for _ in range(TRIES_MAX):
            headers = await self._read_headers(secret, todo, requests, outcomes)
            # A header that is still the same will not fit its segments the next time either.
            headers = {n: each for n, each in headers.items() if seen.get(n) != each}
            seen = headers
            todo = await self._read_segments(secret, headers, requests, into, outcomes)
            if not todo:
                break
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Encrypt each object into a buffer of ours, and write that."""
        secret = self._secret()
        if secret is None:
            return [ConnectorRefusedError("the tenant has no key") for _ in items]
        (sealed,) = await self._threads.each(
            lambda batch, _: _encrypt_all(secret, batch), [items], shares_max=1
        )
        if isinstance(sealed, ConnectorError):
            return [sealed for _ in items]
        return await super().write(sealed)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete what was written with the key, or with the last one if it was taken away."""
        self._secret()
        if self._prefix is not None:
            await super().delete([self._prefix + key for key in keys])

    async def close(self) -> None:
        """End the threads and close the inner connector."""
        self._threads.close()
        await super().close()

    def _secret(self) -> _Secret | None:
        key = self._keys.key(self._tenant)
        if key is None:
            return None
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._prefix = hmac.digest(key, _NAME_LABEL, "sha256")[:NAME_BYTES]
        return _Secret(AESGCM(key), self._prefix)

    async def _read_headers(
        self,
        secret: _Secret,
        todo: Sequence[int],
        requests: Sequence[ReadRequest],
        outcomes: list[ReadOutcome],
    ) -> dict[int, _Header]:
        asked = [ReadRequest(secret.prefix + requests[n].key, 0, _HEADER.size) for n in todo]
        buffers = [memoryview(bytearray(_HEADER.size)) for _ in todo]
        headers: dict[int, _Header] = {}
        answers = await super().read(asked, buffers)
        for n, answer, buffer in zip(todo, answers, buffers, strict=True):
            if answer is None or isinstance(answer, ConnectorError):
                outcomes[n] = answer
            elif header := _decoded(buffer[:answer]):
                headers[n] = header
            else:
                outcomes[n] = ConnectorDataError("the object is not one that was encrypted here")
        return headers

    async def _read_segments(
        self,
        secret: _Secret,
        headers: dict[int, _Header],
        requests: Sequence[ReadRequest],
        into: Sequence[memoryview],
        outcomes: list[ReadOutcome],
    ) -> list[int]:
        """Read and decrypt; return what may have been replaced between header and segments."""
        found = {n: _Opening(requests[n], header, into[n]) for n, header in headers.items()}
        for n in [n for n, job in found.items() if len(job.into) == 0]:
            outcomes[n] = 0
            del found[n]
        jobs = list(found.values())
        stored = [job.stored(secret.prefix) for job in jobs]
        answers = await super().read(stored, [job.sealed for job in jobs])
        (opened,) = await self._threads.each(
            lambda batch, halt: _open_all(secret.cipher, batch, answers, halt), [jobs], shares_max=1
        )
        if isinstance(opened, ConnectorError):
            opened = [opened for _ in found]
        again = []
        for n, outcome in zip(found, opened, strict=True):
            outcomes[n] = outcome
            if outcome is None or isinstance(outcome, ConnectorDataError):
                again.append(n)
        return again

    async def _list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        inner = self._inner
        assert isinstance(inner, Listable), "checked when it was made"
        self._secret()
        if self._prefix is None:
            return
        async for info in inner.list(self._prefix + prefix):
            records = max(1, -(-(info.nbytes - _HEADER.size) // (SEGMENT_BYTES + _EXTRA_BYTES)))
            nbytes = info.nbytes - _HEADER.size - records * _EXTRA_BYTES
            if nbytes >= 0:
                yield KeyInfo(info.key[NAME_BYTES:], nbytes)


class _Opening:
    """One range to be decrypted: what to read for it, where that lands, and where it goes."""

    def __init__(self, request: ReadRequest, header: _Header, into: memoryview) -> None:
        self.header = header
        self.key = request.key
        self.offset = request.offset
        self.into = into[: max(0, min(request.nbytes, header.nbytes - request.offset))]
        self.first = request.offset // SEGMENT_BYTES
        last = (request.offset + len(self.into) - 1) // SEGMENT_BYTES
        self.spans = [_span(header.nbytes, number) for number in range(self.first, last + 1)]
        self.sealed = memoryview(bytearray(sum(self.spans) + _EXTRA_BYTES * len(self.spans)))

    def stored(self, prefix: bytes) -> ReadRequest:
        """Return where the segments lie."""
        start = _HEADER.size + self.first * (SEGMENT_BYTES + _EXTRA_BYTES)
        return ReadRequest(prefix + self.key, start, len(self.sealed))

    def open(self, cipher: AESGCM) -> int:
        """Decrypt into the caller's buffer. Raises ``InvalidTag``."""
        position, scratch = 0, bytearray(SEGMENT_BYTES)
        for number, size in enumerate(self.spans, self.first):
            nonce = self.sealed[position : position + NONCE_BYTES]
            record = self.sealed[position + NONCE_BYTES : position + _EXTRA_BYTES + size]
            position += _EXTRA_BYTES + size
            bound = _bound(self.key, self.header, number)
            start = number * SEGMENT_BYTES - self.offset
            if start >= 0 and start + size <= len(self.into):
                cipher.decrypt_into(nonce, record, bound, self.into[start : start + size])
                continue
            whole = memoryview(scratch)[:size]
            cipher.decrypt_into(nonce, record, bound, whole)
            low, high = max(0, start), min(len(self.into), start + size)
            self.into[low:high] = whole[low - start : high - start]
        return len(self.into)


def _open_all(
    cipher: AESGCM, jobs: Sequence[_Opening], answers: Sequence[ReadOutcome], halt: Halt
) -> list[ReadOutcome]:
    """In a thread: decrypt what has come."""
    outcomes: list[ReadOutcome] = []
    for job, answer in zip(jobs, answers, strict=True):
        if halt.is_set():
            outcomes.append(ConnectorUnavailableError("the call was given up"))
        elif answer is None or isinstance(answer, ConnectorError):
            outcomes.append(answer)
        elif answer != len(job.sealed):
            outcomes.append(ConnectorDataError("an encrypted object that ends too early"))
        else:
            try:
                outcomes.append(job.open(cipher))
            except InvalidTag:
                why = "other bytes than were encrypted here, or with another key"
                outcomes.append(ConnectorDataError(why))
    return outcomes


def _encrypt_all(secret: _Secret, items: Sequence[WriteItem]) -> list[WriteItem]:
    """In a thread: return the objects as they are stored."""
    return [WriteItem(secret.prefix + each.key, _encrypted(secret.cipher, each)) for each in items]


def _encrypted(cipher: AESGCM, item: WriteItem) -> memoryview:
    data = item.data.cast("B")
    header = _Header(secrets.token_bytes(16), data.nbytes)
    records = max(1, -(-data.nbytes // SEGMENT_BYTES))
    sealed = memoryview(bytearray(_HEADER.size + data.nbytes + records * _EXTRA_BYTES))
    _HEADER.pack_into(sealed, 0, _MAGIC, _VERSION, header.object_id, header.nbytes)
    position = _HEADER.size
    for number in range(records):
        size = _span(data.nbytes, number)
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed[position : position + NONCE_BYTES] = nonce
        record = sealed[position + NONCE_BYTES : position + _EXTRA_BYTES + size]
        plain = data[number * SEGMENT_BYTES : number * SEGMENT_BYTES + size]
        cipher.encrypt_into(nonce, plain, _bound(item.key, header, number), record)
        position += _EXTRA_BYTES + size
    return sealed


def _span(nbytes: int, number: int) -> int:
    """Return the plain size of one segment of an object of that size."""
    return max(0, min(SEGMENT_BYTES, nbytes - number * SEGMENT_BYTES))


def _bound(key: bytes, header: _Header, number: int) -> bytes:
    """Return what a segment is bound to: fixed fields first, so that nothing is ambiguous."""
    return _HEADER.pack(_MAGIC, _VERSION, *header) + number.to_bytes(8, "big") + key


def _decoded(data: memoryview) -> _Header | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, object_id, nbytes = _HEADER.unpack(data)
    known = magic == _MAGIC and version == _VERSION and nbytes <= OBJECT_BYTES_MAX
    return _Header(object_id, nbytes) if known else None


def _taken_apart(url: str) -> tuple[str, str]:
    """Return the URL of the store, and the file that ours names. Raises ``ConfigError``."""
    _, _, rest = url.partition("+")
    parts = urlsplit(rest)
    where = f"an {url.partition('://')[0]}:// URL"
    own: list[str] = []
    others: list[str] = []
    for text in parts.query.split("&"):
        (name, value) = next(iter(parse_qsl(text, keep_blank_values=True)), ("", ""))
        if name.startswith(_OPTIONS):
            reject_unknown([name], [KEY_FILE], where)
            own.append(value)
            continue
        if hint := nearest(name, [KEY_FILE]):
            raise ConfigError(f"{where} has no {name!r}{hint}")
        others.append(text)
    if len(own) != 1:
        raise ConfigError(f"{where} names one {KEY_FILE}")
    store = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return (f"{store}?{'&'.join(others)}" if any(others) else store), own[0]
