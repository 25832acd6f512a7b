"""What the examples share that talk to a server: to start one, a long prompt, and an answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(sys.executable).with_name("kvtier-serve")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 600.0
POLL_S = 0.1
TOKENS_PER_ENTRY = 26

PLACES = ["the harbour", "the mill", "the station", "the library", "the market", "the north gate"]
PEOPLE = ["the keeper", "a clerk", "the engineer", "a visitor", "the gardener", "a messenger"]
DEEDS = ["counted the crates", "repaired the pump", "read the gauges", "waited for the ferry"]
WEATHER = ["under a clear sky", "in steady rain", "before the fog came", "while the wind rose"]


@dataclass(frozen=True)
class Answer:
    """One streamed completion. ``ttft_s`` runs from sending the request to its first text."""

    ttft_s: float
    text: str
    tokens: list[str]
    prompt_tokens: int
    cached_by_tier: dict[str, int]


def make_prompt(tokens: int, seed: int) -> str:
    """A station log of about ``tokens`` tokens; another seed differs from its first entry on."""
    rng = random.Random(seed)
    entries = [f"Log {seed} of the signal station."]
    for number in range(1, max(2, tokens // TOKENS_PER_ENTRY + 1)):
        hour, minute = rng.randrange(24), rng.randrange(60)
        entries.append(
            f"Entry {number}, {hour:02}:{minute:02}. At {rng.choice(PLACES)} {rng.choice(PEOPLE)} "
            f"{rng.choice(DEEDS)} {rng.choice(WEATHER)}."
        )
    return "\n".join([*entries, "In short, the log says that"])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(folder: Path, options: Sequence[str]) -> Iterator[int]:
    """Run a server on the disk tier in ``folder``; give its port, stop it as an operator would."""
    port = free_port()
    command = [str(SERVER), "--port", str(port), "--disk", str(folder / "disk"), *options]
    folder.mkdir(exist_ok=True)
    log = folder / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port, log)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server says that it is well; raise when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=POLL_S * 10)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_S)
            raise RuntimeError(f"the server ended with {status}:\n{log.read_text()[-4000:]}")
    raise RuntimeError(f"the server was not ready in {START_TIMEOUT_S:.0f} s")


def ask(port: int, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy completion and time its first text."""
    body = {
        "model": get(port, "/v1/models")["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status}: {response.read().decode()}")
        ttft_s, text, tokens, usage = 0.0, "", [], None
        for event in events(response):
            for choice in event.get("choices", ()):
                if choice["text"]:
                    ttft_s = ttft_s or time.perf_counter() - start
                text += choice["text"]
                tokens += (choice.get("logprobs") or {}).get("tokens", [])
            usage = event.get("usage") or usage
    if not text or usage is None:
        raise RuntimeError("the stream ended without text or without usage")
    tiers = usage["prompt_tokens_details"]["kvtier"]
    return Answer(ttft_s, text, tokens, usage["prompt_tokens"], tiers)


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Decode server-sent events up to the closing one."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(data)
    raise RuntimeError("the stream broke off")


def get(port: int, path: str) -> dict[str, Any]:
    """What a server says there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        said: dict[str, Any] = json.loads(connection.getresponse().read())
        return said
