"""The processes of ``cross_engine.py``: started, given their rounds, ended within a time limit."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.engines.cross_figures import Answer
from kvtier_engine.api.logprobs import token_name
from kvtier_engine.tokenizer import load_tokenizer

ROOT: Final = Path(__file__).resolve().parents[2]
VLLM_PROGRAM: Final = Path(__file__).with_name("cross_vllm.py")
_TOP: Final = 20
_STOP_S: Final = 60
_ENGINES_MAX: Final = 6
_ADDRESS: Final = re.compile(r" on (http://\S+)/v1")
_LISTENING: Final = re.compile(r"^  serves  (\S+)")
#: Of the environment in which vLLM runs the connector beside its scheduler, and says little.
_VLLM: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Orders:
    """A round: each prompt alone, under one salt. What ``reads`` is looked for in the tiers."""

    salt: str
    prompts: Sequence[Sequence[int]]
    count: int
    reads: bool


@dataclass(frozen=True, slots=True)
class Place:
    """An interpreter and what comes first on its path; a process may take so many seconds."""

    python: str
    path: str
    limit_s: float

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for a process there."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1", **(more or {})}
        return found | ({"PYTHONPATH": self.path} if self.path else {})


class ProcessError(RuntimeError):
    """A process ended otherwise than it should; says what it wrote last."""


class Process:
    """A program and the lines of one of its streams. It is killed at its limit, and at the end."""

    def __init__(self, command: Sequence[str], place: Place, *, log: Path, told: str = "") -> None:
        """``told`` is its input, and makes its output what is read, else that is the log."""
        self._log = log
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [place.python, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors if told else subprocess.STDOUT,
                text=True,
                env=place.environment(_VLLM if told else None),
                # One call into libc, looked up before the fork: no lock is waited for in the child.
                preexec_fn=_die_with_us,  # noqa: PLW1509
            )
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(told)
        self._watch = threading.Timer(place.limit_s, self._process.kill)
        self._watch.daemon = True
        self._watch.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, pattern: re.Pattern[str], after: int = 0) -> tuple[int, re.Match[str]]:
        """Wait for a line with ``pattern`` from line ``after`` on; return the next line's number.

        Raises ``ProcessError`` when it ends without.
        """
        with self._changed:
            while True:
                for index in range(after, len(self._lines)):
                    found = pattern.search(self._lines[index])
                    if found:
                        return index + 1, found
                after = len(self._lines)
                if self._ended:
                    raise self.failed("ended without what was waited for")
                self._changed.wait()

    def end(self, number: int = 0) -> None:
        """Signal it if that is asked for, and wait. Raises ``ProcessError`` unless it ends well."""
        if number:
            self._process.send_signal(number)
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired as error:
            raise self.failed(f"does not end in {_STOP_S} s") from error
        if status:
            raise self.failed(f"ended with {status}")

    def close(self) -> None:
        """Kill it if it runs."""
        self._watch.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def failed(self, what: str) -> ProcessError:
        """Return an error with what it said last."""
        said = self._log.read_text(errors="replace")[-3000:]
        return ProcessError(f"{what}:\n{said}\n" + "\n".join(self._lines)[-3000:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextmanager
def closing(process: Process) -> Iterator[Process]:
    """Kill a process at the end, whatever comes."""
    try:
        yield process
    finally:
        process.close()


def run_vllm(place: Place, asked: dict[str, Any], rounds: Sequence[Orders], log: Path) -> list[Any]:
    """Have vLLM do its rounds; return the answers of each."""
    listed = [
        {"salt": each.salt, "prompts": each.prompts, "count": each.count, "reads": each.reads}
        for each in rounds
    ]
    told = json.dumps(asked | {"rounds": listed})
    found, at = [], 0
    with closing(Process([str(VLLM_PROGRAM)], place, log=log, told=told)) as process:
        for _ in rounds:
            at, line = process.line(re.compile(r"^ROUND (.*)"), at)
            found.append([Answer.read(each) for each in json.loads(line[1])])
        process.end()
    return found


def run_serve(
    place: Place, options: Sequence[str], rounds: Sequence[Orders], model: Path, log: Path
) -> list[list[Answer]]:
    """Have kvtier-serve do its rounds; return the answers of each."""
    start = "import sys; from kvtier_engine.main import run; sys.exit(run())"
    names = _ids_by_name(model)
    command = ["-c", start, "--port=0", "--model", str(model), *options]
    with closing(Process(command, place, log=log)) as process:
        _, line = process.line(_ADDRESS)
        _wait_for_tiers(line[1])
        found = [
            [_asked(line[1], tokens, each, names) for tokens in each.prompts] for each in rounds
        ]
        process.end(signal.SIGTERM)
    return found


@contextmanager
def running_daemon(place: Place, socket: Path, log: Path) -> Iterator[str]:
    """Run a cache server and yield its URL."""
    start = "import sys; from kvtier.cli.main import run; sys.exit(run())"
    # It lives as long as all the engines of a case.
    place = replace(place, limit_s=_ENGINES_MAX * place.limit_s)
    listen = ["--listen", f"unix:{socket}", "--dram", "2GiB"]
    with closing(Process(["-c", start, "daemon", *listen], place, log=log)) as process:
        _, line = process.line(_LISTENING)
        yield line[1]
        process.end(signal.SIGTERM)


def _asked(url: str, tokens: Sequence[int], orders: Orders, names: Mapping[str, int]) -> Answer:
    body = {
        "prompt": list(tokens),
        "max_tokens": orders.count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _TOP,
        "cache_salt": orders.salt,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        told = json.load(response)
    (choice,) = told["choices"]
    said = choice["logprobs"]
    tiers = told["usage"]["prompt_tokens_details"]["kvtier"]
    return Answer(
        tokens=[names[name] for name in said["tokens"]],
        top=[{names[n]: value for n, value in step.items()} for step in said["top_logprobs"]],
        found=sum(tiers.values()),
        tier=sum(count for tier, count in tiers.items() if tier != "hbm"),
    )


def _wait_for_tiers(url: str) -> None:
    """Return when no tier is being opened any more."""
    while True:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
            tiers = json.load(response)["tiers"]
        if all(tier["state"] != "opening" for tier in tiers):
            return
        time.sleep(0.05)


def _die_with_us() -> None:
    """In the child: be killed when the thread that started it ends, however that comes about."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ids_by_name(model: Path) -> dict[str, int]:
    tokenizer = load_tokenizer(model)
    return {token_name(tokenizer, index): index for index in range(tokenizer.vocab_size)}
