"""The access log: what it says, what it never says, and how much it may take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.obs.access_log import SALT_BYTES_MAX, SALT_BYTES_MIN, AccessLog
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


def test_a_full_disk_is_counted_and_hurts_nobody() -> None:
    log = AccessLog(Path("/dev/full"), SALT)
    write(log, 1.0, [chunk_key("a")], Features())
    log.flush()
    log.close()
    assert log.dropped_count > 0


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
