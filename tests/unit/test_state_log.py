"""An operator reads in the log that the disk is not used, why, and that it is used again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Cache, CacheConfig, DiskConfig
from kvtier.cache.state_log import StateLog
from kvtier.constants import LOG_INTERVAL_S, MIB


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
