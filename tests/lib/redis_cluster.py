"""A cluster of real servers whose slots a test moves, and a master with sentinels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from tests.lib.program import free_port
from tests.lib.redis_servers import RedisServer, redis_server

SLOTS = 16_384
READY_S_MAX = 30.0
_LOOK_S = 0.05


class RedisCluster:
    """Masters without replicas; each holds an equal share of the slots."""

    def __init__(self, servers: list[RedisServer], bus_ports: list[int]) -> None:
        self.servers = servers
        share = SLOTS // len(servers) + 1
        for number, server in enumerate(servers):
            first = number * share
            last = min(first + share, SLOTS) - 1
            call(server, "CLUSTER", "ADDSLOTSRANGE", first, last)
            call(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, bus_port in zip(servers[1:], bus_ports[1:], strict=True):
            call(servers[0], "CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)
        for server in servers:
            wait_until(partial(self._knows_all, server))
        self.ids = [text(call(server, "CLUSTER", "MYID")) for server in servers]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}"

    def owner(self, slot: int) -> int:
        """Return the number of the server that holds a slot, as it says itself."""
        for number, server in enumerate(self.servers):
            for first, last, (_, port, *_), *_ in call(server, "CLUSTER", "SLOTS"):
                if first <= slot <= last and port == server.port:
                    return number
        raise AssertionError(f"nobody holds slot {slot}")

    def begin_move(self, slot: int, source: int, target: int) -> list[str]:
        """Let a slot be on its way; return the names of its keys, all of them at the source."""
        call(self.servers[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        call(self.servers[source], "CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])
        names: list[str] = call(self.servers[source], "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        return sorted(names)

    def move_keys(self, names: list[str], source: int, target: int) -> None:
        port = self.servers[target].port
        words = ("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *names)
        call(self.servers[source], *words)

    def end_move(self, slot: int, target: int) -> None:
        for number in (target, *(n for n in range(len(self.servers)) if n != target)):
            call(self.servers[number], "CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])

    def _knows_all(self, server: RedisServer) -> bool:
        info = call(server, "CLUSTER", "INFO")
        return (
            info["cluster_state"] == "ok"
            and int(info["cluster_known_nodes"]) == len(self.servers)
            and int(info["cluster_slots_ok"]) == SLOTS
        )


@contextmanager
def redis_cluster(folder: Path, count: int = 3) -> Iterator[RedisCluster]:
    """Run a cluster as long as the context lasts."""
    with ExitStack() as stack:
        bus_ports = [free_port() for _ in range(count)]
        servers = [
            stack.enter_context(
                redis_server(
                    folder / f"node{number}",
                    *("--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
                    *("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "2000"),
                )
            )
            for number, bus_port in enumerate(bus_ports)
        ]
        yield RedisCluster(servers, bus_ports)


class WatchedRedis:
    """A master, its replica, and the sentinel that names the master ``m``."""

    def __init__(self, servers: list[RedisServer], sentinel: RedisServer) -> None:
        self.servers = servers
        self._sentinel = sentinel
        wait_until(lambda: self._state()["num-slaves"] == 1)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self._sentinel.port}?service=m"

    def wait_for_replica(self) -> None:
        """Wait until the replica has all that the master has."""
        master, replica = self.servers
        wait_until(lambda: _replicated(replica) >= _replicated(master))

    def fail_over(self) -> None:
        """Let the replica take over from a master that works; return when both have changed."""
        wait_until(lambda: call(self._sentinel, "SENTINEL", "FAILOVER", "m") == b"OK")
        self.wait_for_new_master()
        # As the sentinel will, when it asks the old master the next time.
        old, new = self.servers
        call(old, "REPLICAOF", "127.0.0.1", new.port)

    def wait_for_new_master(self) -> None:
        wait_until(lambda: self._state()["port"] == self.servers[1].port)
        wait_until(lambda: self._role(self.servers[1]) == b"master")

    def _state(self) -> dict[str, Any]:
        flat = [text(each) for each in call(self._sentinel, "SENTINEL", "MASTER", "m")]
        pairs = dict(zip(flat[::2], flat[1::2], strict=False))
        return {"port": int(pairs["port"]), "num-slaves": int(pairs["num-slaves"])}

    def _role(self, server: RedisServer) -> bytes:
        role: bytes = call(server, "ROLE")[0]
        return role


@contextmanager
def redis_with_sentinel(folder: Path) -> Iterator[WatchedRedis]:
    """Run the three as long as the context lasts."""
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(folder / "master"))
        follow = ("--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0")
        replica = stack.enter_context(redis_server(folder / "replica", *follow))
        wait_until(lambda: call(replica, "ROLE")[3] == b"connected")
        settings = (
            f"sentinel monitor m 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds m 300\nsentinel failover-timeout m 2000\n"
        )
        sentinel = stack.enter_context(redis_server(folder / "sentinel", sentinel=settings))
        yield WatchedRedis([master, replica], sentinel)


def _replicated(server: RedisServer) -> int:
    role = call(server, "ROLE")
    return int(role[1] if role[0] == b"master" else role[4])


def call(server: RedisServer, *words: object) -> Any:
    """Run one command on one server."""
    command: Any
    with server.client() as command:
        if words[0] == "CLUSTER":
            return command.execute_command(f"{words[0]} {words[1]}", *words[2:])
        return command.execute_command(*words)


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def wait_until(happened: Callable[[], bool]) -> None:
    """Look until it has; servers of others tell nobody when they are ready."""
    pause = threading.Event()
    for _ in range(int(READY_S_MAX / _LOOK_S)):
        try:
            if happened():
                return
        except redis.RedisError:
            pass
        pause.wait(_LOOK_S)
    raise AssertionError("it did not happen in time")
