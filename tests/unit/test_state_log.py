"""An operator reads in the log how the disk does and what was damaged there, and no flood."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvtier import Cache, CacheConfig, DiskConfig
from kvtier.cache.state_log import DamageLog, StateLog
from kvtier.constants import LOG_INTERVAL_S, MIB
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.types import Tier
from tests.lib.cache_setup import CHUNK, cache_setup, store_one, tier_stats, written
from tests.lib.disk_lab import damage


def test_what_is_well_is_not_told() -> None:
    log = StateLog("/kv")
    assert log.line("opening", "reading the index", 0.0) is None
    assert log.line("ok", "", 1.0) is None


def test_a_fault_is_told_at_once_with_its_reason() -> None:
    line = StateLog("/kv").line("full", "No space left on device", 0.0)
    assert line == (
        "disk tier /kv: full (No space left on device); requests are answered all the same"
    )


def test_a_state_is_told_once_and_its_end_too() -> None:
    log = StateLog("/kv")
    assert log.line("full", "", 0.0)
    assert log.line("full", "", 2 * LOG_INTERVAL_S) is None
    assert log.line("ok", "", 2 * LOG_INTERVAL_S) == "disk tier /kv: ok again"
    assert log.line("ok", "", 4 * LOG_INTERVAL_S) is None


def test_one_line_a_minute_and_what_stays_is_told_then() -> None:
    log = StateLog("/kv")
    assert log.line("full", "", 0.0)
    assert log.line("ok", "", LOG_INTERVAL_S / 2) is None
    assert log.line("missing", "", LOG_INTERVAL_S * 0.75) is None
    assert "missing" in str(log.line("missing", "", LOG_INTERVAL_S))


def test_damage_is_told_at_once_and_then_once_a_minute_with_its_count() -> None:
    log = DamageLog("/kv")
    assert log.line(0, "", 0.0) is None
    assert log.line(1, "q/a.kvs", 1.0) == (
        "disk tier /kv: a damaged shard went to quarantine, the latest is q/a.kvs"
    )
    for second in range(2, 61):
        assert log.line(10 * second, "q/b.kvs", float(second)) is None
    assert log.line(601, "q/c.kvs", 1 + LOG_INTERVAL_S) == (
        "disk tier /kv: 600 damaged shards went to quarantine, the latest is q/c.kvs"
    )
    assert log.line(601, "q/c.kvs", 9 * LOG_INTERVAL_S) is None, "nothing is news"


class Lines(logging.Handler):
    """Keeps messages and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.some = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.some.set()


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    logging.getLogger("kvtier.disk").addHandler(lines)
    yield lines
    logging.getLogger("kvtier.disk").removeHandler(lines)


def test_a_directory_that_cannot_be_used_is_logged(tmp_path: Path, lines: Lines) -> None:
    (tmp_path / "kv").write_text("a file is in the way")
    cache = Cache(CacheConfig(dram_bytes=64 * MIB, disk=DiskConfig(str(tmp_path / "kv"))))
    assert lines.some.wait(20)
    cache.close()
    (message,) = lines.messages
    assert message.startswith(f"disk tier {tmp_path}/kv: missing (")


def test_many_damaged_shards_are_few_lines_and_all_in_the_figures(
    tmp_path: Path, lines: Lines
) -> None:
    count, clock = 12, FakeClock()
    with cache_setup(tmp_path) as setup:
        engine = setup.open()
        starts = range(0, count * CHUNK, CHUNK)
        for start in starts:
            store_one(engine, start)
        written(engine)
        setup.close(engine)
        for path in setup.shard_files():
            damage(path)
        engine = setup.open(clock=clock)
        for start in starts:
            engine.load(engine.match(engine.sequence(range(start, start + CHUNK))))
        disk = partial(tier_stats, engine.cache, Tier.DISK)
        wait_until(lambda: disk().quarantined_files == count, "not all are put away")
        assert disk().counters.corrupt_shards == count
        assert lines.some.wait(20)

        def all_told() -> bool:
            clock.advance(LOG_INTERVAL_S)
            return told(lines.messages) == count

        wait_until(all_told, "the rest is not told")
        assert len(lines.messages) < count / 3


def told(messages: list[str]) -> int:
    """Of how many damaged shards the lines tell."""
    found = re.findall(r": (a|\d+) damaged shard", " ".join(messages))
    return sum(1 if count == "a" else int(count) for count in found)
