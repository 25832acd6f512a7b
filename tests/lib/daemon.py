"""``kvtier daemon`` as a process: started, asked, stopped or killed, and never left behind."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("kvtier")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Daemon:
    """A running server. Its thread and its process end with ``daemon``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    @property
    def urls(self) -> list[str]:
        """Where it serves, in the order in which it was told to."""
        found = [re.fullmatch(r"  serves  (\S+)", line) for line in self.log]
        return [match[1] for match in found if match]

    @property
    def http(self) -> str:
        """Where operators look."""
        (url,) = (line.split()[1] for line in self.log if line.startswith("  http"))
        return url

    def wait_until_serving(self, listeners: int) -> None:
        """Return when it listens everywhere; fail when it ends without."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or len(self.urls) == listeners, START_TIMEOUT_S
            )
            assert len(self.urls) == listeners, "\n".join(self.log)

    def get(self, path: str, token: str = "") -> Any:
        """What the control plane answers, as JSON."""
        return json.loads(self.get_text(path, token))

    def get_text(self, path: str, token: str = "") -> str:
        request = urllib.request.Request(self.http + path)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def ask(
        self, method: str, path: str, body: object = None, token: str = "", **headers: str
    ) -> tuple[int, Any]:
        """Send JSON to the control plane; return the status and the answer, whatever they are."""
        told = {"Content-Type": "application/json", **headers}
        if token:
            told["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data, told, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_for_line(self, part: str) -> None:
        """Return once a line with this has been logged; fail when it ends without."""
        with self._changed:
            said = self._changed.wait_for(
                lambda: self._ended or any(part in line for line in self.log), START_TIMEOUT_S
            )
            assert said, self.log
            assert any(part in line for line in self.log), "\n".join(self.log)

    def connections(self) -> dict[str, int]:
        """What the data plane counts."""
        figures: dict[str, int] = self.get("/v1/stats")["connections"]
        return figures

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


@contextmanager
def daemon(*arguments: str, listen: Sequence[str] = ("127.0.0.1:0",)) -> Iterator[Daemon]:
    """Start the program and yield once it serves; kill it if it still runs after.

    Fails when it has logged a traceback: no fault that a test makes is unexpected.
    """
    options = [f"--listen={each}" for each in listen]
    options += [] if any(each.startswith("--dram") for each in arguments) else ["--dram=128MiB"]
    process = subprocess.Popen(
        [PROGRAM, "daemon", *options, "--http=127.0.0.1:0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # One call into libc, looked up before the fork: no lock is waited for in the child.
        preexec_fn=_die_with_the_test,  # noqa: PLW1509
    )
    running = Daemon(process)
    try:
        running.wait_until_serving(len(listen))
        yield running
    finally:
        running.end()
    assert not any("Traceback" in line for line in running.log), "\n".join(running.log)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_the_test() -> None:
    """In the child: be killed when the thread that started it ends, however that comes about."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
