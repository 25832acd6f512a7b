"""A program of ours as a process: started, waited for, stopped or killed, and never left behind."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Program:
    """A running program and what it logs. Its thread and its process end with ``running``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def wait_for_log(self, seen: Callable[[], bool]) -> None:
        """Return when it has logged what is waited for; fail when it ends without."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or seen(), START_TIMEOUT_S)
            assert seen(), "\n".join(self.log)

    def wait_for_line(self, part: str) -> None:
        """Return when it has logged a line with this; fail when it ends without."""
        self.wait_for_log(lambda: any(part in line for line in self.log))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit code; the log is complete then."""
        self.process.send_signal(number)
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join()
        return code

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._changed:
                    self.log.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class OthersProgram:
    """A server that is no program of ours. A subclass starts ``process``."""

    process: subprocess.Popen[Any] | None = None

    def kill(self) -> None:
        """Kill it as a crash would, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)
            self.process = None

    def freeze(self) -> None:
        """Let it answer nobody until ``thaw``."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)


ProgramT = TypeVar("ProgramT", bound=Program)


@contextmanager
def running(
    kind: type[ProgramT],
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
) -> Iterator[ProgramT]:
    """Start it and yield at once; kill it if it still runs after.

    Fails when it has logged a traceback: no fault that a test makes is unexpected.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=None if environment is None else dict(environment),
        # One call into libc, looked up before the fork: no lock is waited for in the child.
        preexec_fn=_die_with_the_test,  # noqa: PLW1509
    )
    program = kind(process)
    try:
        yield program
    finally:
        program.end()
    assert not any("Traceback" in line for line in program.log), "\n".join(program.log)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_the_test() -> None:
    """In the child: be killed when the thread that started it ends, however that comes about."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
