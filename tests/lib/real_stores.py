"""Real servers below a cache, which a test kills, freezes and starts anew, whatever they are."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from tests.lib.daemon import Daemon, daemon
from tests.lib.program import free_port
from tests.lib.redis_servers import RedisServer, redis_server
from tests.lib.s3_servers import Seaweed, seaweed, url_of

STORES = ("redis", "s3", "daemon")


class Store(Protocol):
    """A server at one address, however often it is started."""

    @property
    def url(self) -> str: ...

    def start(self) -> None:
        """Start it again; it serves."""
        ...

    def kill(self) -> None:
        """Kill it as a crash would, and wait until it is gone."""
        ...

    def freeze(self) -> None:
        """Let it answer nobody until ``thaw``."""
        ...

    def thaw(self) -> None: ...


class RedisStore:
    def __init__(self, server: RedisServer) -> None:
        self.start, self.kill = server.start, server.kill
        self.freeze, self.thaw = server.freeze, server.thaw
        self.url = f"{server.url}?timeout_s=2&connect_timeout_s=1"


class S3Store:
    def __init__(self, server: Seaweed) -> None:
        self.start, self.kill = server.start, server.kill
        self.freeze, self.thaw = server.freeze, server.thaw
        self.url = url_of(server.endpoint, "place", "&timeout_s=2&connect_timeout_s=1&tries=2")


class DaemonStore:
    """What it has on disk outlives a kill."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        port = free_port()
        self.url = f"kvtier://127.0.0.1:{port}?timeout_s=2&connect_timeout_s=1"
        self._options = (f"--disk={folder}/disk", "--disk-bytes=64MiB", "--dram=64MiB")
        self._listen = f"127.0.0.1:{port}"
        self._servers = servers
        self.server: Daemon
        self.start()

    def start(self) -> None:
        made = daemon(*self._options, listen=(self._listen,))
        self.server = self._servers.enter_context(made)

    def kill(self) -> None:
        self.server.stop(signal.SIGKILL)

    def freeze(self) -> None:
        self.server.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.server.process.send_signal(signal.SIGCONT)


@contextmanager
def real_store(kind: str, folder: Path) -> Iterator[Store]:
    """Run a store of a kind; ``s3`` takes the credentials of ``use_credentials``."""
    folder.mkdir()
    with ExitStack() as servers:
        if kind == "redis":
            yield RedisStore(servers.enter_context(redis_server(folder)))
        elif kind == "s3":
            yield S3Store(servers.enter_context(seaweed(folder)))
        else:
            yield DaemonStore(folder, servers)
