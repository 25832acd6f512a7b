"""Starts processes with a cache in them and kills them; tells what is then on disk for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.types import ChunkKey
from tests.lib.kill_child import Job
from tests.lib.kill_engine import SHARDS
from tests.tidy.sources import ROOT


class KillHost:
    """One process that forks those to be killed, so that only it imports anything."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def kill(self, job: Job, reports: int) -> set[str]:
        """Let a job run until it has reported so often, kill it; return the shards that remain.

        Everything returned had its name before the kill, and nothing had begun to remove it.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job.text()}\n")
        self._process.stdin.flush()
        remaining = {
            str(path) for folder in job.folders for path in Path(folder, "shards").rglob("*.kvs")
        }
        pid = int(self._line())
        for number in range(sys.maxsize):
            if number == reports:
                os.kill(pid, signal.SIGKILL)
            line = self._line()
            if line.startswith("ended"):
                assert line == f"ended {-signal.SIGKILL}", "it ended by itself"
                return remaining
            (remaining.add if line[0] == "+" else remaining.discard)(line[1:])
        raise AssertionError

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the host of the processes died"
        return line


@contextmanager
def kill_host() -> Iterator[KillHost]:
    """Start a host, and end it with the test."""
    command = [sys.executable, "-m", "tests.lib.kill_child"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        yield KillHost(process)
        assert process.stdin is not None
        process.stdin.close()


def whole_chunks(paths: set[str]) -> set[ChunkKey]:
    """Return the chunks of which all shards are among these files."""
    counts = Counter(Path(path).name[:64] for path in paths)
    return {ChunkKey(bytes.fromhex(key)) for key, count in counts.items() if count == SHARDS}
