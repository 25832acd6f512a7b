"""What a restart costs: time to first token of a long prompt, computed and from disk.

Starts ``kvtier-serve`` with an empty disk tier, sends a long prompt, stops the server, starts a new
one on the same disk and sends the prompt again. Both requests are the first that their server gets.
Repeats with other prompts, prints the medians, and fails unless both answers are the same text.
The disk tier lies in a temporary folder; ``TMPDIR`` chooses the disk where that is memory.

    .venv/bin/python examples/restart_reuse.py
    .venv/bin/python examples/restart_reuse.py --repetitions 5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SERVER = Path(sys.executable).with_name("kvtier-serve")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 600.0
POLL_S = 0.1
TOKENS_PER_ENTRY = 26
SEED = 1

PLACES = ["the harbour", "the mill", "the station", "the library", "the market", "the north gate"]
PEOPLE = ["the keeper", "a clerk", "the engineer", "a visitor", "the gardener", "a messenger"]
DEEDS = ["counted the crates", "repaired the pump", "read the gauges", "waited for the ferry"]
WEATHER = ["under a clear sky", "in steady rain", "before the fog came", "while the wind rose"]


@dataclass(frozen=True)
class Answer:
    """One streamed completion. ``ttft_s`` runs from sending the request to its first text."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached_by_tier: dict[str, int]


@dataclass(frozen=True)
class Repetition:
    """One prompt: computed by the first server, then asked of the one after the restart."""

    cold: Answer
    restarted: Answer

    @property
    def same_text(self) -> bool:
        """Whether the restart changed nothing that a client reads."""
        return self.cold.text == self.restarted.text


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
def serving(options: argparse.Namespace, folder: Path) -> Iterator[int]:
    """Run a server on the disk tier in ``folder``; give its port, stop it as an operator would."""
    port = free_port()
    command = [str(SERVER), "--port", str(port), "--disk", str(folder / "disk")]
    command += ["--dram", options.dram, "--disk-bytes", options.disk_bytes]
    command += ["--model", options.model] if options.model else []
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
        "model": model_name(port),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
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
        ttft_s, text, usage = 0.0, "", None
        for event in events(response):
            if event.get("choices") and event["choices"][0]["text"]:
                ttft_s = ttft_s or time.perf_counter() - start
                text += event["choices"][0]["text"]
            usage = event.get("usage") or usage
    if not text or usage is None:
        raise RuntimeError("the stream ended without text or without usage")
    tiers = usage["prompt_tokens_details"]["kvtier"]
    return Answer(ttft_s, text, usage["prompt_tokens"], tiers)


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Decode server-sent events up to the closing one."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(data)
    raise RuntimeError("the stream broke off")


def model_name(port: int) -> str:
    """The name of the one model that is served."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models")
        name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
        return name


def repeat(options: argparse.Namespace, seed: int) -> Repetition:
    """Compute one prompt, restart, ask again; the disk starts empty."""
    prompt = make_prompt(options.prompt_tokens, seed)
    answers = []
    with tempfile.TemporaryDirectory(prefix="kvtier-restart-") as name:
        for _ in range(2):
            with serving(options, Path(name)) as port:
                answers.append(ask(port, prompt, options.max_tokens))
    return Repetition(*answers)


def summarize(runs: list[Repetition]) -> dict[str, Any]:
    """The medians and what stands behind them, as plain values."""
    cold = statistics.median(run.cold.ttft_s for run in runs)
    restarted = statistics.median(run.restarted.ttft_s for run in runs)
    return {
        "ttft_cold_s": round(cold, 4),
        "ttft_after_restart_s": round(restarted, 4),
        "ratio": round(cold / restarted, 2),
        "same_text": all(run.same_text for run in runs),
        "machine": f"{platform.machine()}, {platform.platform()}",
        "repetitions": [asdict(run) for run in runs],
    }


def print_table(summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    last = summary["repetitions"][-1]
    rows = [("cold", "ttft_cold_s", "cold"), ("after restart", "ttft_after_restart_s", "restarted")]
    print(f"{'':15}{'TTFT (median)':>15}   prompt tokens, of them cached by tier (last run)")
    for title, field, run in rows:
        tiers = {tier: count for tier, count in last[run]["cached_by_tier"].items() if count}
        print(f"{title:15}{summary[field]:>13.3f} s   {last[run]['prompt_tokens']}, {tiers or '-'}")
    print(f"{'ratio':15}{summary['ratio']:>14.1f}x   of {len(summary['repetitions'])} runs")
    print(f"{'same text':15}{'yes' if summary['same_text'] else 'NO':>15}")


def main() -> int:
    """Measure; return 1 when a restart changed an answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder or GGUF file (the bundled model)")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        choices=range(1, 101),
        metavar="1..100",
        help="prompts to measure (3)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="about that many (1800)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens to generate (24)")
    parser.add_argument("--dram", default="1GiB", help="size of the DRAM tier (1GiB)")
    parser.add_argument("--disk-bytes", default="4GiB", help="size of the disk tier (4GiB)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    runs = []
    for number in range(options.repetitions):
        runs.append(repeat(options, SEED + number))
        told = f"cold {runs[-1].cold.ttft_s:.2f} s, restarted {runs[-1].restarted.ttft_s:.2f} s"
        print(f"prompt {number + 1} of {options.repetitions}: {told}", file=sys.stderr)
    summary = summarize(runs)
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary)
    return 0 if summary["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
