"""The access log: what it says, what it never says, and how much it may take."""

from __future__ import annotations

import errno
import json
import resource
import stat
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.obs.access_log import (
    SALT_BYTES_DEFAULT,
    SALT_BYTES_MAX,
    SALT_BYTES_MIN,
    AccessLog,
    kept_salt,
)
from kvtier.sim.reader import read_trace
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ChunkKey, Features, Hint, Tier

SALT = b"0123456789abcdef"


def write(log: AccessLog, time_s: float, keys: list[ChunkKey], features: Features) -> None:
    log.write(
        time_s,
        keys,
        chunk_tokens=256,
        prompt_tokens=256 * len(keys) + 3,
        hit_tokens={Tier.DRAM: 256},
        features=features,
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(path, SALT)
    keys = [chunk_key(name) for name in range(4)]
    write(log, 10.0, keys[:3], Features())
    write(log, 12.5, keys, Features(turn=2, hint=Hint.WILL_CONTINUE))
    log.close()
    log.close()
    trace = read_trace(path)
    assert trace.block_tokens == 256
    assert list(trace.times_s) == [10.0, 12.5]
    assert [list(each) for each in trace.paths()] == [[0, 1, 2], [0, 1, 2, 3]]
    assert list(trace.turns) == [1, 2]
    assert list(trace.hints) == [0, list(Hint).index(Hint.WILL_CONTINUE)]
    assert list(trace.prompt_tokens) == [771, 1027]


def test_keys_are_salted(tmp_path: Path) -> None:
    """Neither a key nor anything that another salt would give stands in the file."""
    lines = []
    for name, salt in (("one", SALT), ("other", SALT[::-1]), ("again", SALT)):
        log = AccessLog(tmp_path / name, salt)
        write(log, 1.0, [chunk_key("secret")], Features())
        log.close()
        lines.append((tmp_path / name).read_text())
    one, other, again = (json.loads(line) for line in lines)
    assert one["keys"] == again["keys"]
    assert one["keys"] != other["keys"]
    assert chunk_key("secret").hex()[:16] not in lines[0]
    fields = {"time", "keys", "chunk_tokens", "prompt_tokens", "hit_tokens", "turn", "hint"}
    assert set(one) == fields


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """A full file steps aside for a new one; a line that can never fit is dropped and counted."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(path, SALT, bytes_max=1000)
    for turn in range(40):
        write(log, float(turn), [chunk_key(turn)], Features())
    write(log, 41.0, [chunk_key(name) for name in range(100)], Features())
    log.close()
    older = path.with_name("access.jsonl.1")
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, older.name]
    assert 0 < path.stat().st_size <= 1000
    assert 0 < older.stat().st_size <= 1000
    assert log.dropped_count == 1
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["time"] == 39.0


def test_an_existing_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    for turn in range(2):
        log = AccessLog(path, SALT)
        write(log, float(turn), [chunk_key("same")], Features())
        log.close()
    assert read_trace(path).request_count == 2


def test_the_first_fault_ends_the_log_and_hurts_nobody() -> None:
    log = AccessLog(Path("/dev/full"), SALT)
    for _ in range(3):
        write(log, 1.0, [chunk_key("a")], Features())
    log.close()
    assert log.dropped_count == 3
    assert log.fault is not None
    assert log.fault.errno == errno.ENOSPC


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The disk takes ten bytes of the second line: they are taken back."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(path, SALT)
    write(log, 1.0, [chunk_key("a")], Features())
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        write(log, 2.0, [chunk_key("b")], Features())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(log, 3.0, [chunk_key("c")], Features())
    assert log.fault is not None
    assert log.dropped_count == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("torn", [b'{"time":3.0,"ke', b'{"time"', b"\0" * 200_000])
def test_what_a_power_cut_left_of_a_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "access.jsonl"
    for time_s in (1.0, 2.0):
        log = AccessLog(path, SALT)
        write(log, time_s, [chunk_key("a")], Features())
        log.close()
        with path.open("ab") as file:
            file.write(torn)
    AccessLog(path, SALT).close()
    assert list(read_trace(path).times_s) == [1.0, 2.0]


def test_a_torn_first_line_leaves_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    path.write_bytes(b'{"time":3.0,"ke')
    AccessLog(path, SALT).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"timestamp": 3}\n'])
def test_what_is_no_access_log_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no access log"):
        AccessLog(path, SALT)
    assert path.read_text() == text


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(path, SALT)
    with pytest.raises(ConfigError, match="another process writes it"):
        AccessLog(path, SALT)
    log.close()
    AccessLog(path, SALT).close()


def test_a_file_that_cannot_step_aside_ends_the_log(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    (tmp_path / "access.jsonl.1").mkdir()
    log = AccessLog(path, SALT, bytes_max=300)
    for turn in range(4):
        write(log, float(turn), [chunk_key(turn)], Features())
    assert isinstance(log.fault, IsADirectoryError)
    assert path.stat().st_size <= 300
    assert read_trace(path).request_count == 4 - log.dropped_count


def test_a_salt_is_made_once_and_is_its_users_alone(tmp_path: Path) -> None:
    one, other = kept_salt(tmp_path / "one"), kept_salt(tmp_path / "other")
    assert len(one) == SALT_BYTES_DEFAULT
    assert one != other
    assert kept_salt(tmp_path / "one") == one
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600


def test_b113_a_salt_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"short: 4 bytes, not 32"):
        kept_salt(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"missing/salt: No such file"):
        kept_salt(tmp_path / "missing" / "salt")


@pytest.mark.parametrize(
    "salt", [b"", b"x" * (SALT_BYTES_MIN - 1), b"x" * (SALT_BYTES_MAX + 1)], ids=len
)
def test_salts_have_a_range(tmp_path: Path, salt: bytes) -> None:
    with pytest.raises(ConfigError, match="salt"):
        AccessLog(tmp_path / "log", salt)


def test_limits_and_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bytes_max"):
        AccessLog(tmp_path / "log", SALT, bytes_max=0)
    with pytest.raises(ConfigError, match="missing"):
        AccessLog(tmp_path / "missing" / "log", SALT)
