"""``kvtier-serve`` as a process of its own, started and stopped as an operator does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("kvtier-serve")
STOP_TIMEOUT_S = 60


@dataclass
class Served:
    """A running server. ``said`` is what it wrote until it served."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+(?=/v1)", "\n".join(self.said))
        assert found, self.said
        return found[0]

    @property
    def command(self) -> str:
        """The command that it proposes."""
        return self.said[-1].strip()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Signal it; return its exit code and what it wrote since it served."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=STOP_TIMEOUT_S)
        return self.process.returncode, rest


@contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Start the program on a free port; yield once it serves; kill it if it still runs after."""
    process = subprocess.Popen(
        [PROGRAM, "--port=0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=None if environment is None else dict(environment),
    )
    served = Served(process)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            served.said.append(line.rstrip("\n"))
            if served.said[-1].startswith("  curl "):
                break
        else:
            raise AssertionError("\n".join(served.said))
        yield served
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, for starts that must fail."""
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=STOP_TIMEOUT_S
    )
