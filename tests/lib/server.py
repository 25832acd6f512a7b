"""``kvtier-serve`` as a process: started, asked, stopped or killed, and never left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tests.lib.program import STOP_TIMEOUT_S, Program, running
from tests.lib.reference import token_ids

PROGRAM = Path(sys.executable).with_name("kvtier-serve")
REQUEST_TIMEOUT_S = 120.0
STATE_TIMEOUT_S = 45.0
POLL_S = 0.02
#: For tests that promise hits: a load is worth waiting for, however long one takes here and however
#: quickly so short a prompt is computed.
LOAD_ALWAYS = "--gpu-time-worth=1000000"

Metrics = Mapping[str, float]
T = TypeVar("T")


@dataclass
class Answer:
    """One greedy completion as its client saw it. ``finish`` is None when the client left."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ttft_s: float = 0.0
    finish: str | None = None
    cached: dict[str, int] = field(default_factory=dict)


class Served(Program):
    """A running server. Its threads and its process end with ``serving``."""

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+(?=/v1)", "\n".join(self.log))
        assert found, self.log
        return found[0]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for those who speak to a socket."""
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    @property
    def command(self) -> str:
        """The command that it proposes."""
        return next(line for line in self.log if line.startswith("  curl ")).strip()

    def pause(self) -> None:
        """Hold all of its threads where they are, until ``resume``."""
        self.process.send_signal(signal.SIGSTOP)
        # Returns when it has stopped, and leaves its end, should it have ended, to ``process``.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        with closing(self._connection()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def health(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.get("/health")[1])
        return report

    def tier(self, name: str) -> dict[str, Any]:
        """What ``/health`` says of a tier."""
        (tier,) = (tier for tier in self.health()["tiers"] if tier["name"] == name)
        return dict(tier)

    def metrics(self) -> Metrics:
        """Every series by its name with labels, as scraped."""
        status, text = self.get("/metrics")
        assert status == http.client.OK, text
        return read_metrics(text)

    def wait_until(
        self, reached: Callable[[Metrics], bool], timeout_s: float = STATE_TIMEOUT_S
    ) -> Metrics:
        """Look at the metrics until they are as wanted, and return them."""
        return self._until(self.metrics, reached, told, timeout_s)

    def wait_for_disk(self, state: str, timeout_s: float = STATE_TIMEOUT_S) -> dict[str, Any]:
        """Look at ``/health`` until the disk tier is in this state, and return what it says."""
        return self.wait_for_tier("disk", state, timeout_s)

    def wait_for_tier(
        self, name: str, state: str, timeout_s: float = STATE_TIMEOUT_S
    ) -> dict[str, Any]:
        """Look at ``/health`` until a tier is in this state, and return what it says."""
        return self._until(
            lambda: self.tier(name), lambda tier: tier["state"] == state, str, timeout_s
        )

    def _until(
        self,
        look: Callable[[], T],
        reached: Callable[[T], bool],
        tell: Callable[[T], str],
        timeout_s: float,
    ) -> T:
        deadline = time.monotonic() + timeout_s
        while not reached(seen := look()):
            assert time.monotonic() < deadline, tell(seen)
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(POLL_S)
                raise AssertionError(f"the server ended with {code}:\n" + "\n".join(self.log))
        return seen

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        leave_after: int | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **fields: Any,
    ) -> Answer:
        """Stream one greedy completion of exactly ``max_tokens`` tokens.

        ``leave_after`` hangs up after so many tokens, 0 right after sending. Raises ``OSError`` or
        ``HTTPException`` when the server dies meanwhile; any answer but 200 fails the test.
        """
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        answer = Answer(tuple(prompt))
        with closing(self._connection(timeout_s)) as connection:
            began = time.monotonic()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            if leave_after == 0:
                return answer
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise AssertionError(f"{response.status}: {response.read().decode()}")
            for event in _events(response):
                assert "error" not in event, event
                for choice in event["choices"]:
                    if choice["logprobs"]:
                        answer.ttft_s = answer.ttft_s or time.monotonic() - began
                        answer.tokens += token_ids(choice["logprobs"]["tokens"])
                    answer.text += choice["text"]
                    answer.finish = choice["finish_reason"]
                if event["usage"]:
                    answer.cached = event["usage"]["prompt_tokens_details"]["kvtier"]
                elif leave_after is not None and len(answer.tokens) >= leave_after:
                    response.close()
                    return answer
        return answer

    def _connection(self, timeout_s: float = REQUEST_TIMEOUT_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=timeout_s)


@contextmanager
def starting(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Start the program on a free port and yield at once; kill it if it still runs after.

    Fails when it has logged a traceback: no fault that a test makes is unexpected.
    """
    with running(Served, [PROGRAM, "--port=0", *arguments], environment) as served:
        yield served


@contextmanager
def serving(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """As ``starting``, and yield once it serves."""
    with starting(*arguments, environment=environment) as served:
        served.wait_for_line("  curl ")
        yield served


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, for starts that must fail."""
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=STOP_TIMEOUT_S
    )


def read_metrics(text: str) -> Metrics:
    """Return every series of a scrape by its name with labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in lines}


def series(name: str, **labels: str) -> str:
    """The key of one series among the metrics."""
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"kvtier_{name}{{{inside}}}" if inside else f"kvtier_{name}"


def told(metrics: Metrics) -> str:
    """What the metrics say, for whoever reads a failure."""
    return "\n".join(
        f"{name} {value:g}" for name, value in metrics.items() if value and "_bucket" not in name
    )


def idle(metrics: Metrics) -> bool:
    """Tell whether nothing runs, moves or is held for anybody."""
    gauges = [series("sequences", state=state) for state in ("running", "waiting", "loading")]
    gauges += [series("blocks", state="used")]
    gauges += [
        series(name) for name in ("loads_inflight", "stores_inflight", "writes_queued", "late_jobs")
    ]
    gauges += [series("tier_pinned_chunks", tier=tier) for tier in ("dram", "disk")]
    return not any(metrics.get(name, 0.0) for name in gauges)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise ConnectionError("the stream broke off")
