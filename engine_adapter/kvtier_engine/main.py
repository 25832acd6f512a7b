"""The program ``kvtier-serve``: settings, socket, model, banner, signals, exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import uvicorn

from kvtier.config import format_size
from kvtier.errors import ConfigError, KVTierError, MissingExtraError, RegistryError
from kvtier_engine.options import usage
from kvtier_engine.serve import Server, build
from kvtier_engine.settings import EngineConfig, load_settings

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_SETTINGS = 2

#: What connections get beyond the drain to take their last answers.
_LAST_ANSWERS_S = 5
_LISTEN_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not listened on
_SETTINGS_ERRORS = (ConfigError, MissingExtraError, RegistryError)


def run() -> int:
    """Be the program. Returns the exit code: 0 ended, 1 could not serve, 2 settings at fault."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(usage() + "\n")
        return EXIT_OK
    if "--version" in arguments:
        sys.stdout.write(f"kvtier-serve {version('kvtier')}\n")
        return EXIT_OK
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return serve(arguments)
    except KVTierError as error:
        _say(f"kvtier-serve: {error}")
        return EXIT_SETTINGS if isinstance(error, _SETTINGS_ERRORS) else EXIT_FAILED
    except OSError as error:
        _say(f"kvtier-serve: {error}")
        return EXIT_FAILED


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns 0. Raises ``KVTierError`` or ``OSError`` when it cannot."""
    settings = load_settings(arguments, os.environ)
    config = settings.config
    # Before the model is loaded, which takes long: a taken port is known at once.
    with _bound(config.host, config.port) as listener:
        _say(f"kvtier-serve: loading {config.model}")
        server = build(settings)
        try:
            Program(server, listener).run(sockets=[listener])
        finally:
            server.close()
    return EXIT_OK


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind, without listening yet, so that clients are refused until there is an answer."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"cannot listen on {host} port {port} (--host, --port): {reason}"
            raise OSError(message) from error
        yield listener


class Program(uvicorn.Server):
    """uvicorn's server with a banner when it listens and a drain when it is told to stop."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
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
                timeout_graceful_shutdown=math.ceil(drain_s) + _LAST_ANSWERS_S,
            )
        )
        self._server = server
        self._listener = listener
        self._stops: set[asyncio.Task[bool]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, then say so."""
        await super().startup(sockets=sockets)
        _say(banner(self._server, self._listener.getsockname()[1]))

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
            _say(f"kvtier-serve: stopping; running requests have {drain_s:g} s to end")
        self._server.admission.drain()
        self.should_exit = True
        stop = asyncio.create_task(asyncio.to_thread(self._server.engine.stop, drain_s))
        self._stops.add(stop)
        stop.add_done_callback(self._stops.discard)


def banner(server: Server, port: int) -> str:
    """Return what the program says when it begins to serve."""
    config, facts, model = server.settings.config, server.facts, server.model
    host = _LISTEN_ANYWHERE.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    hbm = server.snapshot().engine.blocks_total * facts.block_bytes
    runs = f"weights {model.weights_id[:12]}, {facts.dtype} on {facts.device}"
    lines = [
        f"kvtier-serve {version('kvtier')} serves {model.name} on {url}/v1",
        f"  model  {runs}, context {model.context_tokens} tokens",
        f"  hbm    {format_size(hbm)}, blocks of {facts.block_tokens} tokens",
        *(f"  {line}" for line in _tier_lines(server)),
    ]
    if config.host in _LISTEN_ANYWHERE and not config.api_key:
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
        yield (
            f"disk   {format_size(config.disk_bytes)} in {config.disk}, write-{config.disk_mode}, "
            f"durability {config.durability}"
        )


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


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
