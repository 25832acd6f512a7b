"""What of the Mooncake connector needs no Mooncake: its URL, its codes, and what to install."""

from __future__ import annotations

import sys

import pytest

from kvtier.constants import GIB, MIB
from kvtier.errors import ConfigError, ConnectorError, MissingExtraError
from kvtier.registry import connect
from kvtier_connectors.mooncake import CODES, Settings, parse_url


def test_a_url_says_where_the_master_is_and_what_we_bring() -> None:
    assert parse_url("mooncake://host") == Settings("host", 50_051)
    url = "mooncake://host:7000?segment=1GiB&buffer=2MiB&protocol=rdma&device=mlx5_0&hostname=me"
    found = parse_url(f"{url}&metadata=http://meta:8080&threads=9")
    assert (found.port, found.segment_bytes, found.buffer_bytes) == (7000, GIB, 2 * MIB)
    assert (found.protocol, found.device, found.hostname) == ("rdma", "mlx5_0", "me")
    assert (found.metadata, found.threads) == ("http://meta:8080", 9)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("mooncake://host?segmant=1GiB", r"no 'segmant' \(did you mean 'segment'\?\)"),
        ("mooncake://host?segment=1GB", "segment: not a size"),
        ("mooncake://host?threads=0", "threads is '0'"),
        ("mooncake://host?threads=65", "threads is '65'"),
        ("mooncake://host?protocol=udp", "allowed: rdma, tcp"),
        ("mooncake://", "mooncake://master:50051"),
        ("mooncake://user:secret@host", "mooncake://master:50051"),
        ("mooncake://host:port", "cannot be taken apart"),
    ],
)
def test_a_bad_url_is_a_config_error(bad: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        connect(bad)
    assert "secret" not in str(caught.value)


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "mooncake.store"):  # Other tests may have imported it.
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r'pip install "kvtier\[mooncake\]".*libibverbs'):
        connect("mooncake://host")


def test_every_code_is_one_of_our_outcomes() -> None:
    assert all(issubclass(kind, ConnectorError) for kind in CODES.values())
