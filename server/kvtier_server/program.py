"""The server as a process: opens its cache, listens, says so, and stops in order when told to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Final

import uvicorn
import uvloop
from fastapi import FastAPI

from kvtier.cache.cache import Cache
from kvtier.clock import SystemClock
from kvtier.config import format_size
from kvtier.constants import CONTROL_REQUESTS_MAX
from kvtier.errors import ConfigError, KVTierError
from kvtier.obs.dashboard.history import History
from kvtier.registry import connect, shown_url
from kvtier_server.acceptor import Acceptor
from kvtier_server.control import create_app
from kvtier_server.dashboard import recorded
from kvtier_server.data_plane import DataPlane
from kvtier_server.disk_check import DiskCheck
from kvtier_server.figures import Snapshot, stats_of
from kvtier_server.gate import Control
from kvtier_server.http_guard import GuardedProtocol
from kvtier_server.keeper import Keeper
from kvtier_server.live import Live
from kvtier_server.settings import Address, DaemonConfig
from kvtier_server.shared import exported
from kvtier_server.sockets import bound, raise_descriptor_limit

Say = Callable[[str], None]

_HTTP_STOP_S: Final = 2


def run_daemon(config: DaemonConfig, read: Callable[[], DaemonConfig], say: Say) -> None:
    """Serve until SIGINT or SIGTERM, then drain and close. Main thread only.

    At SIGHUP ``read`` reads the settings anew. ``say`` takes lines for the operator. Raises
    ``KVTierError`` for what cannot be served.
    """
    descriptors = raise_descriptor_limit()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    tls = None if config.tls is None else config.tls.context()
    http_tls = None if config.http_tls is None else config.http_tls.context()
    mode = config.socket_mode
    with ExitStack() as undo:
        listeners = [
            undo.enter_context(bound("--listen", address, mode=mode)) for address in config.listen
        ]
        http = None if config.http is None else undo.enter_context(bound("--http", config.http))
        if 2 * config.connections_max > descriptors:
            say(f"kvtier daemon: {_few(config.connections_max, descriptors)}")
        asyncio.run(_try_remotes(config))
        cache = _opened(config)
        undo.callback(cache.close)
        uvloop.run(_serve(config, read, cache, listeners, http, (tls, http_tls), say))


async def _try_remotes(config: DaemonConfig) -> None:
    """Open and close each remote, which asks none of them. Raises ``ConfigError`` that names it."""
    for url in (remote.url for remote in config.cache.remotes):
        try:
            connector = connect(url)
        except KVTierError as error:
            raise ConfigError(f"--remote {shown_url(url)}: {error}") from error
        await connector.close()


def _opened(config: DaemonConfig) -> Cache:
    """Open the cache. Raises ``ConfigError`` where its memory is not to be had."""
    try:
        return Cache(exported(config))
    except ConfigError as error:
        raise ConfigError(f"--dram = {format_size(config.cache.dram_bytes)}: {error}") from error


async def _serve(
    config: DaemonConfig,
    read: Callable[[], DaemonConfig],
    cache: Cache,
    listeners: Sequence[socket.socket],
    http: socket.socket | None,
    contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
    say: Say,
) -> None:
    tls, http_tls = contexts
    clock = SystemClock()
    plane = DataPlane(
        cache,
        config.door,
        clock,
        connections_max=config.connections_max,
        idle_s=config.idle_s,
    )
    began_s = clock.now()

    def snapshot() -> Snapshot:
        return Snapshot(
            cache=cache.stats(),
            counters=plane.counters,
            connections=plane.connections,
            inflight_bytes=plane.budget.used_bytes,
            stopped_connections=plane.budget.stopped_count,
            uptime_s=clock.now() - began_s,
            draining=plane.draining,
        )

    live = Live(config, read, cache, plane, [each for each in contexts if each is not None])
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    reloads: set[asyncio.Task[None]] = set()
    loop.add_signal_handler(signal.SIGHUP, _begin_reload, live, reloads, say)
    check = DiskCheck(() if config.cache.disk is None else config.cache.disk.paths)
    keeper, history = Keeper(cache, clock), History()
    control = Control(snapshot, live, keeper, check, lambda: plane.credentials, stopping.set)
    app = create_app(control, history)
    try:
        urls = [plane.listen(listener, tls) for listener in listeners]
        plane.start()
        async with (
            _control(app, http, http_tls) as url,
            recorded(history, lambda: stats_of(snapshot())),
        ):
            say(banner(config, urls, url))
            await stopping.wait()
            drain_s = live.config.drain_s
            say(f"kvtier daemon: stopping; what runs has {drain_s:g} s to end")
            await _drain(plane, drain_s, hurrying)
    finally:
        await check.stop()
        await plane.drain(0)


def _few(connections: int, descriptors: int) -> str:
    needed = "a connection takes one, or two where it shares memory"
    return f"--connections is {connections}, and descriptors are {descriptors}: {needed}"


async def _drain(plane: DataPlane, seconds: float, hurrying: asyncio.Event) -> None:
    """Drain within the time, or until somebody has asked for the second time."""
    loop = asyncio.get_running_loop()
    both = {loop.create_task(plane.drain(seconds)), loop.create_task(hurrying.wait())}
    for task in (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[1]:
        task.cancel()


def _begin_reload(live: Live, reloads: set[asyncio.Task[None]], say: Say) -> None:
    task = asyncio.get_running_loop().create_task(_reload(live, say))
    reloads.add(task)
    task.add_done_callback(reloads.discard)


async def _reload(live: Live, say: Say) -> None:
    try:
        changed = await live.reload()
    except KVTierError as error:
        say(f"kvtier daemon: the settings stay as they are: {error}")
        return
    say(f"kvtier daemon: the settings are read anew; others are: {', '.join(changed) or 'none'}")


class _Control(uvicorn.Server):
    """uvicorn's server without a socket, in a loop whose signals are somebody else's."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=_HTTP_STOP_S,
                limit_concurrency=CONTROL_REQUESTS_MAX,
            )
        )
        self.config.load()

    def connection(self) -> GuardedProtocol:
        """Return what serves one more connection."""
        return GuardedProtocol(config=self.config, server_state=self.server_state, app_state={})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@contextlib.asynccontextmanager
async def _control(
    app: FastAPI, listener: socket.socket | None, tls: ssl.SSLContext | None
) -> AsyncIterator[str]:
    """Serve HTTP meanwhile; give its URL, empty without a socket."""
    if listener is None:
        yield ""
        return
    server = _Control(app)
    # Whoever shakes hands is bounded, as uvicorn's own would not be: it takes descriptors, too.
    acceptor = Acceptor(listener, server.connection, tls, lambda _peer, _why: None)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[]))
    host, port = listener.getsockname()[:2]
    try:
        yield f"http{'' if tls is None else 's'}://{Address(host, port)}"
    finally:
        acceptor.close()
        server.should_exit = True
        await serving


def banner(config: DaemonConfig, urls: Sequence[str], http: str) -> str:
    """Return what the program says when it begins to serve. Its last line names a URL."""
    cache = config.cache
    lines = [f"kvtier daemon {version('kvtier')}", f"  dram    {format_size(cache.dram_bytes)}"]
    if cache.disk is not None:
        size = format_size(cache.disk.capacity_bytes)
        lines.append(f"  disk    {size} in {', '.join(cache.disk.paths)}")
    # There may be a password in the rest of a URL.
    lines += [f"  remote  {remote.url.partition('://')[0]}" for remote in cache.remotes]
    if http:
        lines.append(f"  http    {http}")
    beyond = [str(address) for address in config.listen if not address.loopback]
    if config.insecure and beyond:
        lines.append(f"  note    anybody who reaches {', '.join(beyond)} is trusted (--insecure)")
    return "\n".join([*lines, *(f"  serves  {url}" for url in urls)])
