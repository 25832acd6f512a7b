"""The program from outside: exit codes, what it says, signals, sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from kvtier_engine.api.limits import DRAIN_DEADLINE_S
from kvtier_engine.options import BY_NAME
from tests.lib.server import LOAD_ALWAYS, PROGRAM, Served, refused, series, serving, starting
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

LONG = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 30_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_position_embeddings=1 << 20)
    return write_folder(tmp_path_factory.mktemp("tiny"), config, tiny_tensors(config))


def options(folder: Path, *more: str) -> list[str]:
    tiers = [] if "--no-cache" in more else ["--dram=64MiB"]
    return [f"--model={folder}", "--kv-bytes=64MiB", *tiers, *more]


def test_help_and_version_go_to_stdout() -> None:
    told = refused("--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "--kv-bytes SIZE" in told.stdout
    told = refused("--version")
    assert (told.returncode, told.stdout) == (0, f"kvtier-serve {version('kvtier')}\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prot", "1"], "did you mean '--port'"),
        (["--no-cache", "--disk", "/d"], "--no-cache contradicts --disk"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_settings_at_fault_end_with_two_and_one_line(arguments: list[str], part: str) -> None:
    told = refused(*arguments)
    assert told.returncode == 2
    assert told.stdout == ""
    last = told.stderr.splitlines()[-1]
    assert last.startswith("kvtier-serve: ")
    assert part in last
    assert "Traceback" not in told.stderr


def test_a_taken_port_ends_with_one_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refused("--port", str(port), "--model", str(tmp_path))
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert f"127.0.0.1 port {port}" in line
    assert "--port" in line
    told = refused("--host", "no.such.host.invalid")
    assert told.returncode == 1
    assert len(told.stderr.splitlines()) == 1


def test_the_proposed_command_works_and_a_restart_finds_the_kv_on_disk(
    folder: Path, tmp_path: Path
) -> None:
    # A shell may get a name with a quote in it; the command must still be one command.
    arguments = options(folder, f"--disk={tmp_path}/kv", "--served-model-name=it's", LOAD_ALWAYS)
    prompt = {"prompt": list(range(200)) * 2, "max_tokens": 1, "temperature": 0}
    answers = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving(*arguments) as served:
            assert "choices" in run_in_shell(served.command, dict(os.environ))
            assert any(f"{tmp_path}/kv" in line for line in served.log)
            answers.append(httpx.post(f"{served.url}/v1/completions", json=prompt).json())
            assert served.stop(number) == 0
    first, second = answers
    assert first["choices"] == second["choices"]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["kvtier"] == {"hbm": 0, "dram": 0, "disk": 256, "remote": 0}


def run_in_shell(command: str, environment: dict[str, str]) -> dict[str, object]:
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=True, env=environment
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


class Stream:
    """A streamed request in a thread of its own."""

    def __init__(self, served: Served, body: dict[str, object]) -> None:
        self.first = threading.Event()
        self.lines: list[str] = []
        self._url = f"{served.url}/v1/completions"
        self._body = {**body, "stream": True}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self.first.set()

    def join(self) -> list[str]:
        self._thread.join()
        return self.lines


def test_an_interrupt_before_it_serves_is_no_traceback(folder: Path) -> None:
    with starting(*options(folder, "--no-cache")) as served:
        served.wait_for_line("kvtier-serve: loading ")
        assert served.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert served.log[1:] == ["kvtier-serve: interrupted"]


def test_the_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    command = [str(PROGRAM.with_name("kvtier")), "doctor", f"--path={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk tier" in done.stdout


def test_a_signal_lets_running_requests_end(folder: Path) -> None:
    with serving(*options(folder, "--no-cache")) as served:
        stream = Stream(served, {**LONG, "max_tokens": 300})
        assert stream.first.wait(60)
        assert served.stop() == 0
        lines = stream.join()
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]


def test_a_signal_gives_up_what_takes_too_long(folder: Path) -> None:
    with serving(*options(folder, "--no-cache", "--drain-seconds=0")) as served:
        stream = Stream(served, LONG)
        assert stream.first.wait(60)
        assert served.stop() == 0
        lines = stream.join()
    assert '"code":"aborted"' in lines[-1]
    assert BY_NAME["drain_seconds"].default == DRAIN_DEADLINE_S


def test_a_client_that_does_not_read_does_not_hold_up_the_end(folder: Path) -> None:
    with serving(*options(folder, "--no-cache", "--drain-seconds=0")) as served:
        body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 16})
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(served.address)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: it\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            deaf.sendall(head.encode() + body.encode())
            # Each makes about a kilobyte: by then it is stuck, whatever the system buffers.
            served.wait_until(lambda seen: seen[series("generated_tokens_total")] > 9_000)
            assert served.stop() == 0


def test_b95_a_closed_socket_ends_its_request(folder: Path) -> None:
    environment = {**os.environ, "KVTIER_API_KEY": "sesame"}
    with serving(*options(folder, "--no-cache"), environment=environment) as served:
        assert not any("sesame" in line for line in served.log)
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert "choices" in run_in_shell(served.command, environment)
        key = {"authorization": "Bearer sesame"}
        with httpx.Client(base_url=served.url, timeout=60, headers=key) as client:
            for hang_up in (leave_a_stream, leave_before_the_answer):
                before = aborted(client)
                hang_up(client)
                # A later request is served after the abort has been seen.
                client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
                assert aborted(client) == before + 1
                report = client.get("/health").json()
                assert report["sequences"] == {"running": 0, "waiting": 0, "loading": 0}


def leave_a_stream(client: httpx.Client) -> None:
    body = {**LONG, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


def leave_before_the_answer(client: httpx.Client) -> None:
    impatient = httpx.Timeout(60, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=impatient)


def aborted(client: httpx.Client) -> float:
    name = 'kvtier_sequences_finished_total{reason="abort"} '
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])
