"""The engine's side of the access log: what is noted, and what a bad log does to nobody."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import ConfigError
from kvtier.obs.access_log import AccessLog
from kvtier.sim.reader import read_trace
from kvtier.types import Features, Hint, Namespace, Tier
from kvtier_engine.access_recorder import REQUESTS_QUEUED_MAX, AccessRecorder, open_recorder
from kvtier_engine.request import Request
from tests.lib.toy_engine import ToyEngine, prompt_of
from tests.lib.toy_model import toy_layout

SALT = b"0123456789abcdef"
NAMESPACE = Namespace("toy", toy_layout(4))


def recorder_of(path: Path) -> AccessRecorder:
    """One whose clock counts the requests."""
    times = iter(range(1_000_000))
    return AccessRecorder(AccessLog(path, SALT), NAMESPACE, wall=lambda: float(next(times)))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ended_thread() -> None:
    """Wait for every recorder's thread."""
    for thread in threading.enumerate():
        if thread.name == "kvtier-access-log":
            thread.join()


def admitted_request() -> Request:
    found: list[Request] = []
    engine = ToyEngine(on_admitted=found.append)
    engine.run(prompt_of(1, 9))
    return found[0]


def test_every_admitted_request_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = recorder_of(path)
    recorder.start()
    engine = ToyEngine(tiers=True, on_admitted=recorder.note)
    engine.run(prompt_of(1, 9), 1)
    engine.lose_hbm()
    engine.run(prompt_of(1, 9), 1)
    engine.run([*prompt_of(1, 13)[:8], 5], 1, salt="tenant")
    engine.run([3], 1)
    recorder.close()
    recorder.close()
    first, second, salted, short = lines_of(path)
    assert [each["time"] for each in (first, second, salted, short)] == [0.0, 1.0, 2.0, 3.0]
    assert [each["prompt_tokens"] for each in (first, salted, short)] == [9, 9, 1]
    assert first["hit_tokens"] == {}
    assert second["hit_tokens"] == {Tier.DRAM.value: 8}
    assert len(first["keys"]) == 2
    assert first["keys"] == second["keys"]
    assert not set(first["keys"]) & set(salted["keys"])
    assert short["keys"] == []
    assert read_trace(path).request_count == 4


def test_b160_a_preempted_request_is_one_line() -> None:
    noted: list[Request] = []
    engine = ToyEngine(12, on_admitted=noted.append)
    answers = [engine.submit(prompt_of(seed, 9), 16) for seed in range(1, 5)]
    engine.finish()
    assert engine.core.stats().preemptions > 0
    assert [each.spec for each in noted] == [answer.request for answer in answers]


def test_a_request_that_never_runs_is_no_line() -> None:
    noted: list[Request] = []
    engine = ToyEngine(on_admitted=noted.append)
    answer = engine.submit(prompt_of(1, 9))
    engine.core.abort(answer.request.request_id)
    engine.finish()
    assert noted == []


def test_what_comes_faster_than_it_is_written_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = admitted_request()
    recorder = recorder_of(tmp_path / "log")
    for _ in range(REQUESTS_QUEUED_MAX + 5):
        recorder.note(request)
    recorder.start()
    recorder.close()
    recorder.close()
    recorder.note(request)
    assert len(lines_of(tmp_path / "log")) == REQUESTS_QUEUED_MAX
    assert [each.message for each in caplog.records] == ["the access log lacks 5 requests"]


def test_a_full_disk_ends_the_log_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = recorder_of(Path("/dev/full"))
    recorder.start()
    engine = ToyEngine(on_admitted=recorder.note)
    engine.run(prompt_of(1, 9))
    ended_thread()
    for seed in range(2, 5):
        engine.run(prompt_of(seed, 9))
    recorder.close()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "the access log has ended" in warning.message
    assert "No space left" in warning.message


def test_a_file_system_that_hangs_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody reads takes 64 KiB and then nothing more."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    recorder = recorder_of(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder.start()
    engine = ToyEngine(on_admitted=recorder.note)
    for seed in range(REQUESTS_QUEUED_MAX + 800):
        engine.run(prompt_of(seed, 9), 1)
    recorder.close(timeout_s=0.0)
    assert caplog.records[-1].message.startswith("the access log lacks ")
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as file:
        assert file.read().endswith(b"}\n")
    ended_thread()


def test_the_salt_stays_beside_the_log(tmp_path: Path) -> None:
    """The same prompt has the same keys after a restart, and others in another log."""
    request = admitted_request()
    for name in ("one", "one", "other"):
        recorder = open_recorder(tmp_path / name, NAMESPACE)
        recorder.start()
        recorder.note(request)
        recorder.close()
    before, after = lines_of(tmp_path / "one")
    (other,) = lines_of(tmp_path / "other")
    assert before["keys"] == after["keys"]
    assert not set(before["keys"]) & set(other["keys"])
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["one", "one.salt", "other", "other.salt"]


def test_b113_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing/log"):
        open_recorder(tmp_path / "missing" / "log", NAMESPACE)


def test_turn_and_hint_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    request = admitted_request()
    recorder = recorder_of(path)
    recorder.start()
    engine = ToyEngine(tiers=True, on_admitted=recorder.note)
    spec = engine.request(prompt_of(1, 9))
    assert spec.features == Features()
    features = Features(3, Hint.DONE)
    engine.send(replace(spec, features=features))
    engine.finish()
    recorder.note(request)
    recorder.close()
    assert [(each["turn"], each["hint"]) for each in lines_of(path)] == [(3, "done"), (1, "none")]


def test_the_simulator_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = recorder_of(path)
    recorder.start()
    engine = ToyEngine(on_admitted=recorder.note)
    for turn in range(20):
        engine.run(prompt_of(turn % 4, 9 + 4 * (turn // 4)), 1)
    recorder.close()
    arguments = ["sim", str(path), "--policy", "lru,min", "--capacity", "50%", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--workers", "1"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert {row["policy"] for row in rows} == {"lru", "min"}
