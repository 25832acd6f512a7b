"""A server as a process: it listens, says so, and stops in order when it is told to."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

import uvicorn

from kvtier.config import format_size
from kvtier.registry import shown_url
from kvtier_engine.serve import Server
from kvtier_engine.settings import EngineConfig

#: What connections get beyond the drain to take their last answers.
_LAST_ANSWERS_S: Final = 5
#: Addresses that mean all of them, each with one that a client on this machine may use.
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared only

Say = Callable[[str], None]


def run_server(server: Server, listener: socket.socket, say: Say) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM, then drain and close. Main thread only.

    ``say`` takes lines for the operator.
    """
    try:
        Program(server, listener, say).run(sockets=[listener])
    finally:
        server.close()


class Program(uvicorn.Server):
    """uvicorn's server with a banner when it listens and a drain when it is told to stop."""

    def __init__(self, server: Server, listener: socket.socket, say: Say) -> None:
        drain_s = server.settings.config.drain_seconds
        super().__init__(
            uvicorn.Config(
                server.application(),
                loop="uvloop",
                http="httptools",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                # Never reached: who does not take an answer has been dropped by then.
                timeout_graceful_shutdown=math.ceil(drain_s) + 2 * _LAST_ANSWERS_S,
            )
        )
        self._server = server
        self._listener = listener
        self._say = say
        self._stops: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, then say so."""
        await super().startup(sockets=sockets)
        self._say(banner(self._server, self._listener.getsockname()[1]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at a signal instead of dying of it after the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._drain)
        yield

    def _drain(self) -> None:
        """Take nothing in, let requests end for a while, abort the rest; a second time: at once."""
        drain_s = 0.0 if self._server.admission.draining else None
        if drain_s is None:
            drain_s = self._server.settings.config.drain_seconds
            self._say(f"kvtier-serve: stopping; running requests have {drain_s:g} s to end")
        self._server.admission.drain()
        self.should_exit = True
        stop = asyncio.create_task(self._stop(drain_s))
        self._stops.add(stop)
        stop.add_done_callback(self._stops.discard)

    async def _stop(self, drain_s: float) -> None:
        """Stop the engine, then drop the clients that do not take their last answers."""
        await asyncio.to_thread(self._server.engine.stop, drain_s)
        await asyncio.sleep(_LAST_ANSWERS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def banner(server: Server, port: int) -> str:
    """Return what the program says when it begins to serve."""
    config, facts, model = server.settings.config, server.facts, server.model
    host = _ANYWHERE.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    hbm = server.snapshot().engine.blocks_total * facts.block_bytes
    runs = f"weights {model.weights_id[:12]}, {facts.dtype} on {facts.device}"
    lines = [
        f"kvtier-serve {version('kvtier')} serves {model.name} on {url}/v1",
        f"  model  {runs}, context {model.context_tokens} tokens",
        f"  hbm    {format_size(hbm)}, blocks of {facts.block_tokens} tokens",
        *(f"  {line}" for line in _tier_lines(server)),
    ]
    if config.host in _ANYWHERE and not config.api_key:
        lines.append("  note   listening on every address without --api-key")
    return "\n".join([*lines, "Try:", f"  {_curl(url, config, model.name)}"])


def _tier_lines(server: Server) -> Iterator[str]:
    config, facts = server.settings.config, server.facts
    if config.no_cache:
        yield "cache  none (--no-cache)"
        return
    if facts.cache_problem:
        yield f"cache  none: {facts.cache_problem}"
        return
    yield f"dram   {format_size(config.dram)}, {facts.codec}, chunks of {facts.chunk_tokens} tokens"
    if config.disk:
        codec = f", {config.disk_codec}" if config.disk_codec else ""
        yield (
            f"disk   {format_size(config.disk_bytes)} in {', '.join(config.disk)}{codec}, "
            f"write-{config.disk_mode}, durability {config.durability}"
        )
    for url in config.remote:
        size = format_size(config.remote_bytes) if config.remote_bytes else "unbounded"
        codec = f", {config.remote_codec}" if config.remote_codec else ""
        yield f"remote {size} in {shown_url(url)}{codec}, write-{config.remote_mode}"
    cache = server.snapshot().cache
    for tier in cache.tiers if cache is not None else ():
        if tier.state not in {"ok", "opening"}:
            yield f"note   {tier.tier.value} is {tier.state}: {tier.detail}"


def _curl(url: str, config: EngineConfig, model: str) -> str:
    """Return a command that a shell takes as it is."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    key = ' -H "Authorization: Bearer $KVTIER_API_KEY"' if config.api_key else ""
    return (
        f"curl -s {shlex.quote(url + '/v1/chat/completions')} "
        f"-H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )
