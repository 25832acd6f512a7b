"""Who may do what by HTTP, who a certificate says that its holder is, and who loses its way in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier.config import CacheConfig
from kvtier.constants import MIB
from kvtier_server.access import Caller, caller_of, from_elsewhere
from kvtier_server.credentials import DEFAULT, Door, Tokens, certificate_name
from kvtier_server.settings import Address, DaemonConfig

NAMED = Tokens({"ann": b"a", "ben": b"b"})
OPEN = DaemonConfig((Address("127.0.0.1", 1),), CacheConfig(64 * MIB), Door(None))
GUARDED = replace(OPEN, door=Door(NAMED))


def test_without_tokens_whoever_comes_is_an_operator() -> None:
    assert caller_of(OPEN, b"") == Caller(DEFAULT, operator=True)
    assert caller_of(OPEN, b"anything") == Caller(DEFAULT, operator=True)


def test_named_tokens_are_credentials_and_nobody_is_an_operator() -> None:
    assert caller_of(GUARDED, b"a") == Caller("ann", operator=False)
    for token in (b"", b"c", b"ann"):
        assert caller_of(GUARDED, token) is None


def test_the_one_token_of_a_file_is_an_operators_until_there_is_one_of_its_own() -> None:
    single = replace(OPEN, door=Door(Tokens({DEFAULT: b"x"})))
    assert caller_of(single, b"x") == Caller(DEFAULT, operator=True)
    both = replace(single, operators=Tokens({DEFAULT: b"y"}))
    assert caller_of(both, b"x") == Caller(DEFAULT, operator=False)
    assert caller_of(both, b"y") == Caller(DEFAULT, operator=True)


def test_an_operators_token_alone_closes_the_control_plane() -> None:
    config = replace(OPEN, operators=Tokens({DEFAULT: b"y"}))
    assert caller_of(config, b"") is None
    assert caller_of(config, b"x") is None
    assert caller_of(config, b"y") == Caller(DEFAULT, operator=True)


def test_credentials_touch_what_is_their_own() -> None:
    assert Caller("ann", operator=False).may_touch("ann")
    assert not Caller("ann", operator=False).may_touch("ben")
    assert Caller(DEFAULT, operator=True).may_touch("ben")


PAGES = {
    ("127.0.0.1:7071", None): False,
    ("kvtier.example:7071", None): False,
    ("127.0.0.1:7071", "http://127.0.0.1:7071"): False,
    ("localhost:7071", "http://localhost:7071"): False,
    ("[::1]:7071", "http://[::1]:7071"): False,
    ("127.0.0.1:7071", "https://evil.example"): True,
    ("127.0.0.1:7071", "null"): True,
    ("127.0.0.1:7071", "http://127.0.0.1:8080"): True,
    # A name that was pointed here makes the two agree.
    ("evil.example:7071", "http://evil.example:7071"): True,
    # None that a browser sends.
    ("[x]:7071", "http://[x]:7071"): True,
    ("[::1]:7071", "http://[::1"): True,
}


@pytest.mark.parametrize(("host", "origin"), PAGES)
def test_pages_of_other_places_are_told_apart(host: str, origin: str | None) -> None:
    assert from_elsewhere(host, origin) is PAGES[host, origin]


def subject(*names: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    return ((("organizationName", "kv"),), *((("commonName", name),) for name in names))


CERTIFICATES: list[tuple[dict[str, Any] | None, str | None]] = [
    (None, None),
    ({}, None),
    ({"subject": subject("ann")}, "ann"),
    ({"subject": subject("CA", "ann")}, "ann"),
    ({"subject": subject("a name with spaces")}, None),
    ({"subject": subject()}, None),
    ({"subject": subject("ann"), "subjectAltName": (("DNS", "host-1.kv"),)}, "host-1.kv"),
    ({"subject": subject("ann"), "subjectAltName": (("IP Address", "10.0.0.1"),)}, "ann"),
    ({"subject": subject("ann"), "subjectAltName": (("DNS", "*.kv"), ("DNS", "b"))}, None),
]


@pytest.mark.parametrize(("certificate", "name"), CERTIFICATES)
def test_a_certificate_names_its_holder(
    certificate: dict[str, Any] | None, name: str | None
) -> None:
    assert certificate_name(certificate) == name


def test_the_door_knows_certificates_where_they_are_asked_for() -> None:
    door = Door(NAMED, certificates=True)
    assert door.credential(b"", None, "cat") == "cat"
    assert door.credential(b"", None, None) is None
    assert door.credential(b"a", None, "cat") == "ann"
    assert door.credential(b"c", None, "cat") is None
    assert Door(None, certificates=True).credential(b"", None, None) is None
    assert Door(NAMED).credential(b"", None, "cat") is None


def test_whose_way_in_is_closed() -> None:
    before = Door(NAMED, {7, 8})
    assert before.lost(before) == set()
    assert before.lost(Door(Tokens({"ann": b"a", "ben": b"new", "cat": b"c"}), {8, 9})) == {
        "ben",
        "uid-7",
    }
    assert Door(None).lost(before) == {DEFAULT}
    assert before.lost(Door(None, {7, 8})) == {"ann", "ben"}
