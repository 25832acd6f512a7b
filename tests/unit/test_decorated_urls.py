"""Decorators by URL: ``encrypted+`` and ``sharded+`` before the scheme of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError, RegistryError, nearest
from kvtier.interfaces import Listable
from kvtier.registry import connect, split_scheme
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest
from kvtier_connectors.decorators import Sharded
from kvtier_connectors.decorators.encrypted import KEY_FILE, Encrypted
from kvtier_connectors.decorators.sharded import SHARDS_MAX
from kvtier_connectors.redis.settings import OPTIONS as REDIS_OPTIONS
from tests.lib.opened import Opened

KEYS = [b"key%d" % number for number in range(40)]
OBJECTS = {key: payload_of(key, 500) for key in KEYS}
SECRET = "0f" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    return path


def folders(place: Path, *names: str) -> str:
    """Make folders; return their paths as a URL has them."""
    for name in names:
        (place / name).mkdir()
    return ",".join(f"{place}/{name}" for name in names)


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.kv")}


@pytest.mark.parametrize(
    ("scheme", "parts"),
    [
        ("redis", ([], "redis")),
        ("redis+unix", ([], "redis+unix")),
        ("encrypted+redis", (["encrypted"], "redis")),
        ("encrypted+sharded+kvtier+unix", (["encrypted", "sharded"], "kvtier+unix")),
        ("encryptd+redis+cluster", (["encryptd"], "redis+cluster")),
        ("sharded+reds", (["sharded"], "reds")),
        ("redis+unx", ([], "redis+unx")),
        ("encrypted", ([], "encrypted")),
        ("", ([], "")),
        ("+" * 300, ([], "+" * 300)),
    ],
)
def test_a_scheme_is_split_into_decorators_and_connector(
    scheme: str, parts: tuple[list[str], str]
) -> None:
    assert split_scheme(scheme) == parts


async def test_several_folders_are_one_store_and_order_does_not_matter(
    opened: Opened, tmp_path: Path
) -> None:
    paths = folders(tmp_path, "a", "b", "c")
    first = opened(connect(f"sharded+file://{paths}?sync=none"))
    await put(first, OBJECTS)
    assert all(len(stored(tmp_path / name)) > 3 for name in "abc")
    assert sum(len(stored(tmp_path / name)) for name in "abc") == len(KEYS)
    backwards = ",".join(reversed(paths.split(",")))
    second = opened(connect(f"sharded+file://{backwards}"))
    assert await get_whole(second, dict.fromkeys(KEYS, 500)) == [*OBJECTS.values()]
    assert isinstance(second, Listable)
    assert {info.key async for info in second.list(b"")} == set(KEYS)


async def test_hosts_have_user_path_and_options_in_common(opened: Opened) -> None:
    connector = opened(
        connect("sharded+redis://user:s3cret@h1:7001,h2,[::1]:7003/5?ttl_s=60&connections=2")
    )
    assert isinstance(connector, Sharded)
    owners = {connector.owner_of(key) for key in KEYS}
    assert owners == {"h1:7001", "h2", "[::1]:7003"}


async def test_what_a_folder_is_given_is_encrypted_and_comes_back(
    opened: Opened, tmp_path: Path, key_file: Path
) -> None:
    paths = folders(tmp_path, "a")
    url = f"encrypted+file://{paths}?threads=2&{KEY_FILE}={key_file}"
    await put(opened(connect(url)), OBJECTS)
    assert await get_whole(opened(connect(url)), dict.fromkeys(KEYS, 500)) == [*OBJECTS.values()]
    lying = stored(tmp_path / "a").values()
    assert len(lying) == len(KEYS)
    assert all(data.startswith(b"KVTE") for data in lying)
    assert not any(plain[:16] in data for data in lying for plain in OBJECTS.values())


async def test_another_key_reads_nothing(opened: Opened, tmp_path: Path, key_file: Path) -> None:
    url = f"encrypted+file://{folders(tmp_path, 'a')}?{KEY_FILE}="
    await put(opened(connect(f"{url}{key_file}")), OBJECTS)
    other = tmp_path / "other"
    other.write_text("1f" * 32)
    reader = opened(connect(f"{url}{other}"))
    for outcome, _ in await get(reader, [ReadRequest(key, 0, 500) for key in KEYS]):
        assert outcome is None, "it looks for names of its own"


@pytest.mark.parametrize("order", ["encrypted+sharded", "sharded+encrypted"])
async def test_decorators_stack_in_either_order(
    opened: Opened, tmp_path: Path, key_file: Path, order: str
) -> None:
    url = f"{order}+file://{folders(tmp_path, 'a', 'b')}?{KEY_FILE}={key_file}"
    connector = opened(connect(url))
    assert type(connector) is (Encrypted if order.startswith("encrypted") else Sharded)
    await put(connector, OBJECTS)
    assert await get_whole(connector, dict.fromkeys(KEYS, 500)) == [*OBJECTS.values()]
    assert isinstance(connector, Listable)
    assert {(info.key, info.nbytes) async for info in connector.list(b"")} == {
        (key, 500) for key in KEYS
    }
    assert len(stored(tmp_path / "a")) + len(stored(tmp_path / "b")) == len(KEYS)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "encryptd+memory://",
            r"decorator of connectors 'encryptd' \(did you mean 'encrypted'\?\)",
        ),
        ("sharded+memry://a,b", r"connector 'memry' \(did you mean 'memory'\?\)"),
        ("encrypted+memory://", "names one encryption_key_file"),
        ("encrypted+memory://?encryption_key_fil=/x", r"'encryption_key_fil' \(did you mean"),
        ("encrypted+memory://?encryptoin_key_file=/x", r"'encryptoin_key_file' \(did you mean"),
        ("encrypted+memory://?encryption_key_file=/x&encryption_key_file=/y", "names one"),
        (
            "encrypted+memory://?encryption_key_file=KEY&capacity=1",
            "memory:// URL has no 'capacity'",
        ),
        ("encrypted+encrypted+memory://?encryption_key_file=KEY", "names one encryption_key_file"),
        ("encrypted+memory://?encryption_key_file=/nowhere/key", "No such file"),
        ("sharded+memory://", "by comma, each once"),
        ("sharded+memory://a,,b", "by comma, each once"),
        ("sharded+memory://a,b,a", "by comma, each once"),
        ("sharded+file:///mnt/a,mnt/b", "from the root on|three slashes"),
        ("sharded+file:///mnt/a,/mnt/b?synk=each", r"no 'synk' \(did you mean 'sync'\?\)"),
        ("sharded+redis+cluster://a,b", "several hosts of one store already"),
        ("sharded+redis+sentinel://a,b?service=m", "several hosts of one store already"),
        ("sharded+memory://" + ",".join(map(str, range(SHARDS_MAX + 1))), "names 1 to 256"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, why: str, key_file: Path) -> None:
    with pytest.raises((ConfigError, RegistryError), match=why):
        connect(url.replace("KEY", str(key_file)))


@pytest.mark.parametrize(
    "text", ["", "0f" * 31, "0f" * 33, "xy" * 32, f"{SECRET} {SECRET}", "\xff"]
)
def test_a_file_that_holds_no_key_is_refused_and_not_shown(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as caught:
        connect(f"encrypted+memory://?{KEY_FILE}={key_file}")
    assert not text or text not in str(caught.value)


def test_no_message_shows_the_password_of_a_url(key_file: Path) -> None:
    rest = f"redis://user:s3cret@a,b?prefx=x&{KEY_FILE}={key_file}"
    for url in (f"encrypted+sharded+{rest}", f"sharded+{rest}", f"encryptd+{rest}"):
        with pytest.raises((ConfigError, RegistryError)) as caught:
            connect(url)
        assert "s3cret" not in str(caught.value)


def test_the_key_is_not_shown_by_what_holds_it(key_file: Path) -> None:
    connector = connect(f"encrypted+memory://?{KEY_FILE}={key_file}")
    assert SECRET not in repr(connector) + repr(vars(connector))
    assert bytes.fromhex(SECRET) not in repr(vars(connector)).encode()


def test_no_option_of_a_store_looks_like_a_misspelled_one_of_encryption() -> None:
    stores = (*REDIS_OPTIONS, "token_file", "token_name", "endpoint", "profile", "path_style")
    assert not [name for name in stores if nearest(name, [KEY_FILE])]
