"""What a Redis URL may say, and what it is told where it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_connectors.redis.settings import Kind, Login, Node, Settings, Tls, parse_url


def test_a_plain_url_has_defaults() -> None:
    assert parse_url("redis://host") == Settings(Kind.SERVER, (Node("host", 6379),))


def test_everything_can_be_said() -> None:
    settings = parse_url(
        "rediss://user:p%40ss@host:1/3?prefix=a:&ttl_s=60&connections=2&timeout_s=0.5"
        "&connect_timeout_s=1&ca=/ca&cert=/cert&key=/key&hostname=any"
    )
    assert settings == Settings(
        Kind.SERVER,
        (Node("host", 1),),
        login=Login("user", "p@ss"),
        tls=Tls("/ca", "/cert", "/key", check_hostname=False),
        database=3,
        prefix=b"a:",
        ttl_s=60,
        connections=2,
        timeout_s=0.5,
        connect_timeout_s=1.0,
    )


def test_several_hosts_and_addresses_of_version_6() -> None:
    settings = parse_url("redis+cluster://a:1,b,[::1]:2,[::2]")
    nodes = (Node("a", 1), Node("b", 6379), Node("::1", 2), Node("::2", 6379))
    assert (settings.kind, settings.nodes) == (Kind.CLUSTER, nodes)
    settings = parse_url("redis+sentinel://a,b:3/2?service=m")
    assert settings.nodes == (Node("a", 26379), Node("b", 3))
    assert (settings.service, settings.database) == ("m", 2)


def test_a_unix_socket_is_a_path() -> None:
    settings = parse_url("redis+unix://u:p@/run/a%20b.sock?db=4")
    assert settings.nodes == (Node("/run/a b.sock", 0),)
    assert settings.login == Login("u", "p")
    assert settings.database == 4


def test_a_password_may_lie_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("word\n")
    settings = parse_url(f"redis://user@host?password_file={secret}")
    assert settings.login == Login("user", "word")


@pytest.mark.parametrize("secret", ["redis://u:hush@host", "rediss://:hush@host?hostname=any"])
def test_a_password_is_never_shown(secret: str) -> None:
    settings = parse_url(secret)
    assert settings.login.password == "hush"
    assert "hush" not in f"{settings!r} {settings}"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://u:hush@host?prefx=a", r"no 'prefx' \(did you mean 'prefix'\?\)"),
        ("redis://u:hush@host?ttl_s=0", "ttl_s of a Redis URL is '0'; allowed is 1 to"),
        ("redis://u:hush@host?connections=999", "allowed is 1 to 64"),
        ("redis://u:hush@host?timeout_s=nan", "timeout_s"),
        ("redis://u:hush@host?prefix={a}", "braces"),
        ("redis://u:hush@host?ca=/ca", "ca of a Redis URL is for rediss://"),
        ("rediss://u:hush@host?cert=/c", "cert of a Redis URL is for key"),
        ("rediss://u:hush@host?hostname=no", "allowed: any, check"),
        ("redis://u:hush@host?service=m", "service of a Redis URL is for sentinels"),
        ("redis+sentinel://u:hush@host", "service"),
        ("redis://u:hush@a,b", "several hosts"),
        ("redis://u:hush@", "names a host"),
        ("redis://u:hush@host:0", "the port"),
        ("redis://u:hush@host/x", "the database"),
        ("redis+unix://u:hush@run/redis.sock", "three slashes"),
        ("redis://u:hush@host?password_file=/nowhere", "not in both"),
        ("redis://host?password_file=/nowhere/hush", "No such file"),
        *((f"redis://u:hush{each}more@host:1", "written as %2F") for each in "/?#"),
        ("redis://u:hush?more=1@host", "written as %2F"),
        ("redis://:1/hush@host:1", "written as %2F"),
        ("redis+unix://u:hush?more@/run/redis.sock", "written as %2F"),
    ],
)
def test_a_bad_url_is_a_config_error_without_the_password(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_url(url)
    assert "hush" not in str(caught.value).replace("/nowhere/hush", "")


@pytest.mark.parametrize(
    "url", ["redis://host:1?prefix=a@b", "redis://[::1]?prefix=a@b", "redis+unix:///run/a@b.sock"]
)
def test_an_at_sign_behind_the_host_is_no_password(url: str) -> None:
    assert parse_url(url).login.password is None
