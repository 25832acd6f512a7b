"""What a peer's program and the bench that starts it say to each other, a line per round.

The peer's side runs in the peer's own environment, so this imports nothing of KVTier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MARK = "@@peer "


@dataclass(frozen=True)
class Job:
    """A path of a peer, the chunks that move in a round, and where its files go."""

    section: str
    layers: int
    heads: int
    dim: int
    tokens: int
    chunks: int
    folder: str

    @property
    def payload(self) -> int:
        """Bytes of a chunk: K and V in two bytes an element."""
        return self.layers * 2 * self.heads * self.dim * self.tokens * 2


def serve(start: Callable[[Job], Callable[[int], dict[str, float]]]) -> None:
    """Run a round for each line from the bench; ``start`` returns what runs round N."""
    run = start(Job(**json.loads(sys.argv[1])))
    print(_MARK + "{}", flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(run(int(line))), flush=True)
    # Peers leave threads behind that would keep the process.
    os._exit(0)


def drop_page_cache(folder: str) -> None:
    """Write back and drop the pages of all files there, so that they are read from the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Peer:
    """A peer's program, started and ready; ``round`` returns its speeds in GB/s."""

    def __init__(self, interpreter: Path, program: str, job: Job, log: Path) -> None:
        command = [str(interpreter), str(Path(__file__).with_name(program))]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment | {"THP_MEM_ALLOC_ENABLE": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._name = f"{program} {job.section} (see {log})"
        self._answer()

    def round(self, number: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"{self._name} ended with {self._process.wait(60)}")
