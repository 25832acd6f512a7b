"""Headers that were met: as many as may be, the last ones."""

from __future__ import annotations

from kvtier_connectors.redis.known import KNOWN_MAX, Known
from kvtier_connectors.redis.objects import PART_BYTES, Header

FIRST, SECOND = (Header(PART_BYTES, PART_BYTES, bytes([n]) * 16) for n in (1, 2))


def test_the_last_header_of_a_key_is_found_until_it_is_forgotten() -> None:
    known = Known()
    known.learn(b"key", FIRST)
    known.learn(b"key", SECOND)
    assert known.find(b"key") == SECOND
    assert known.find(b"other") is None
    known.forget(b"key")
    known.forget(b"key")
    assert known.find(b"key") is None


def test_of_too_many_those_go_that_were_learned_first() -> None:
    known = Known()
    for number in range(KNOWN_MAX):
        known.learn(b"%d" % number, FIRST)
    known.learn(b"0", SECOND)
    known.learn(b"new", FIRST)
    assert known.find(b"0") == SECOND
    assert known.find(b"1") is None
    assert known.find(b"new") == FIRST
