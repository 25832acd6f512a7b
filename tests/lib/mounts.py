"""A directory that is a disk of its own, to be filled, taken away and given back. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """A tmpfs at ``place``, once it is plugged in. ``folder`` is the tier's directory on it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = place / "kv"
        self._mounted = 0

    def plug_in(self, nbytes: int) -> None:
        """Mount an empty disk of that size."""
        self._mount("-t", "tmpfs", "-o", f"size={nbytes}", "none")

    def resize(self, nbytes: int) -> None:
        _run("mount", "-o", f"remount,size={nbytes}", str(self.place))

    def leave_room(self, nbytes: int) -> None:
        """Make it so small that no more than that fits beside what it holds."""
        status = os.statvfs(self.place)
        held_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        self.resize(held_bytes + nbytes)

    def write_protect(self) -> None:
        """Let every later open see a read-only file system; what is open stays."""
        self._mount("--bind", str(self.place))
        _run("mount", "-o", "remount,bind,ro", str(self.place))

    def pull_out(self) -> None:
        """Undo the latest of ``plug_in`` and ``write_protect``, although files are open there."""
        _run("umount", "--lazy", str(self.place))
        self._mounted -= 1

    def pull_out_all(self) -> None:
        while self._mounted:
            self.pull_out()

    def _mount(self, *arguments: str) -> None:
        _run("mount", *arguments, str(self.place))
        self._mounted += 1


@contextmanager
def removable_disk(place: Path) -> Iterator[Disk]:
    """Give a disk that is not plugged in yet; whatever is mounted in the end is unmounted."""
    disk = Disk(place)
    try:
        yield disk
    finally:
        disk.pull_out_all()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
