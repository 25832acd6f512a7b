"""``kvtier daemon`` as a process: started, asked, stopped or killed, and never left behind."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.testing.engine_double import wait_until
from tests.lib.program import Program, running

PROGRAM = Path(sys.executable).with_name("kvtier")


class Daemon(Program):
    """A running server. Its thread and its process end with ``daemon``."""

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
        self.wait_for_log(lambda: len(self.urls) == listeners)

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

    def wait_until_ready(self) -> None:
        """Until its disk is open: it serves before."""
        wait_until(lambda: self.ask("GET", "/ready")[0] == 200, "it does not get ready")

    def wait_until_written(self, token: str = "") -> None:
        """Until what clients have stored lies below, on disk or in remotes."""
        wait_until(
            lambda: not self.get("/v1/stats", token)["cache"]["writes_queued"], "writes do not end"
        )

    def held(self) -> dict[str, int]:
        """What it holds for clients. What goes to disk is pinned until it is there."""
        stats = self.get("/v1/stats")
        cache, connections = stats["cache"], stats["connections"]
        found = {name: connections[name] for name in ("open", "inflight_bytes", "stopped")}
        found |= {name: cache[name] for name in ("loads_inflight", "stores_inflight")}
        pinned = {f"pinned in {tier['name']}": tier["pinned_chunks"] for tier in stats["tiers"]}
        return found | pinned

    def wait_until_nothing_is_held(self) -> None:
        """Until nobody is there and nothing is kept for anybody."""
        try:
            wait_until(lambda: not any(self.held().values()), "something is held for nobody")
        except AssertionError as error:
            error.add_note(str(self.held()))
            raise

    def connections(self) -> dict[str, int]:
        """What the data plane counts."""
        figures: dict[str, int] = self.get("/v1/stats")["connections"]
        return figures


@contextmanager
def daemon(
    *arguments: str,
    listen: Sequence[str] = ("127.0.0.1:0",),
    program: Sequence[str | Path] = (PROGRAM,),
) -> Iterator[Daemon]:
    """Start the program and yield once it serves; kill it if it still runs after.

    Fails when it has logged a traceback: no fault that a test makes is unexpected.
    """
    options = [f"--listen={each}" for each in listen]
    options += [] if any(each.startswith("--dram") for each in arguments) else ["--dram=128MiB"]
    command: list[str | Path] = [*program, "daemon", *options]
    command += ["--http=127.0.0.1:0", *arguments]
    with running(Daemon, command) as server:
        server.wait_until_serving(len(listen))
        yield server
