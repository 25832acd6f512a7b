"""The server that a command asks: URLs and keys that cannot be are refused and not shown."""

from __future__ import annotations

import pytest

from kvtier.cli.secrets import bearer, server_url
from kvtier.errors import ConfigError


@pytest.mark.parametrize("url", ["http://host:8000", "https://host", "http://[::1]:80/path"])
def test_a_servers_url_is_taken_apart(url: str) -> None:
    assert server_url("--url", url).geturl() == url


@pytest.mark.parametrize(
    "url", ["http://", "host:80", "ftp://host", "http://[::1", "http://host:99999", "http://host:x"]
)
def test_a_url_of_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        server_url("--url", url)


@pytest.mark.parametrize("url", ["http://user:hidden@host", "ftp://:hidden@host"])
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_url("--url", url)
    assert "hidden" not in str(caught.value)


def test_a_key_goes_into_a_header() -> None:
    assert bearer("key") == {"authorization": "Bearer key"}
    assert bearer("") == {}


@pytest.mark.parametrize("key", ["hidden\nx: y", "hidden\r", "hidden€"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bearer(key)
    assert "hidden" not in str(caught.value)
