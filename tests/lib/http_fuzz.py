"""Bytes for a server of HTTP: sound requests, requests that are nearly so, and what is none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from tests.lib.wire_corpus import mutated

_JSON = "Content-Type: application/json\r\n"


def _request(method: str, target: str, headers: str = "", body: bytes = b"") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\n{length}{headers}\r\n".encode() + body


def _posted(target: str, body: object) -> bytes:
    return _request("POST", target, _JSON, json.dumps(body).encode())


_EVERYTHING = {"objects": {"all": True}}
CORPUS = (
    _request("GET", "/health"),
    _request("GET", "/metrics"),
    _request("GET", "/v1/stats", "Authorization: Bearer x\r\n"),
    _request("GET", "/v1/history?a=%00&b=%ff#c"),
    _request("HEAD", "/ready", "Connection: close\r\n"),
    _request("OPTIONS", "*"),
    _posted("/v1/evict", _EVERYTHING),
    _posted("/v1/pin", {**_EVERYTHING, "seconds": 1}),
    _posted("/v1/warm", {"objects": {"keys": ["00ff"]}, "seconds": 1}),
    _posted("/v1/invalidate", {"objects": {"keys": ["6b6579"]}}),
    _request("PUT", "/v1/quotas", _JSON, b'{"quota_bytes": 0}'),
    _request("POST", "/v1/evict", f"Transfer-Encoding: chunked\r\n{_JSON}")
    + b'6\r\n{"obje\r\n0\r\n\r\n',
    _request("POST", "/v1/evict", f"Expect: 100-continue\r\nContent-Length: 9\r\n{_JSON}"),
    _request("GET", "/", "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    _request("CONNECT", "example.com:80"),
    _request("GET", "http://example.com/health"),
    b"GET /health\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
)
_CHUNKED = _request("POST", "/v1/evict", f"Transfer-Encoding: chunked\r\n{_JSON}")
_SIZES = (b"-1", b"0x10", b"ffffffffffffffff", b"fffffffffffffffff", b"7;" + b"x" * 4096, b"", b"g")
_LENGTHS = ("-1", "1e9", "99999999999", "18446744073709551615", "9" * 400, "5, 6", "0x5", "")


def noise(draws: random.Random) -> bytes:
    """Bytes of no kind."""
    return draws.randbytes(draws.choice((1, 19, 300, 100_000)))


def changed(draws: random.Random) -> bytes:
    """A sound request with a few bytes changed, taken out or put in."""
    return mutated(draws, draws.choice(CORPUS))


def cut(draws: random.Random) -> bytes:
    """The beginning of a sound request."""
    whole = draws.choice(CORPUS)
    return whole[: draws.randrange(len(whole))]


def several(draws: random.Random) -> bytes:
    """Many requests in one go, whose answers nobody may read."""
    return draws.choice(CORPUS) * draws.choice((2, 50, 2000))


def wrong_length(draws: random.Random) -> bytes:
    """A body of another length than is said."""
    length = f"Content-Length: {draws.choice(_LENGTHS)}\r\n{_JSON}"
    return _request("POST", "/v1/evict", length) + draws.randbytes(draws.choice((0, 5, 5000)))


def wrong_chunks(draws: random.Random) -> bytes:
    """A body in pieces whose sizes are none, or not those of the pieces."""
    pieces = [draws.choice(_SIZES) + b"\r\n" + draws.randbytes(7) + b"\r\n" for _ in range(5)]
    return _CHUNKED + b"".join(pieces)


def hostile_body(draws: random.Random) -> bytes:
    """JSON that is deep, long, no JSON, or says what may not be said."""
    bodies = (
        b"[" * 50_000,
        b'{"objects":' * 5_000,
        b'{"objects": {"all": true, "credential": "' + b"\\u0000" * 50 + b'"}}',
        b'{"objects": {"keys": ["' + b"z" * 9999 + b'"]}}',
        b'{"objects": {"all": 1e999}}',
        b'{"objects": {"all": ' + b"9" * 10_000 + b"}}",
        b"\xff\xfe{}",
        b'{"objects": {"all": true}, "objects": {"all": true}}',
    )
    target = draws.choice(("/v1/evict", "/v1/pin", "/v1/unpin", "/v1/warm", "/v1/invalidate"))
    return _request("POST", target, _JSON, draws.choice(bodies))


#: One connection's bytes each, which end by themselves.
STREAMS: tuple[Callable[[random.Random], bytes], ...] = (
    noise,
    changed,
    changed,
    cut,
    several,
    wrong_length,
    wrong_chunks,
    hostile_body,
)


def endless(draws: random.Random) -> Iterator[bytes]:
    """A head, or a body, that does not end before the server ends it."""
    kind = draws.randrange(4)
    if kind == 0:
        yield b"GET /" + b"x" * 65_536
        more = b"y" * 65_536
    elif kind == 1:
        yield b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: "
        more = b"z" * 65_536
    elif kind == 2:
        yield b"GET /health HTTP/1.1\r\nHost: x\r\n"
        more = b"X-Many: 1\r\n" * 6000
    else:
        yield _CHUNKED
        more = b"ffff\r\n" + b"w" * 65_535 + b"\r\n"
    while True:
        yield more
