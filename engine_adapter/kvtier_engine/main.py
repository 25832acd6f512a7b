"""The program ``kvtier-serve``: settings, socket, model, banner, signals, exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType

from kvtier.errors import ConfigError, KVTierError, MissingExtraError, RegistryError
from kvtier.registry import import_problem
from kvtier_engine.beforehand import check_beforehand
from kvtier_engine.options import usage
from kvtier_engine.settings import load_settings

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

_SETTINGS_ERRORS = (ConfigError, MissingExtraError, RegistryError)


def run() -> int:
    """Be the program. Returns the exit code: 0 ended, 1 could not serve, 2 settings at fault.

    130 is for an interrupt before it served: later, a signal is an order to end.
    """
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
    except KeyboardInterrupt:
        _say("kvtier-serve: interrupted")
        return EXIT_INTERRUPTED


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns 0. Raises ``KVTierError`` or ``OSError`` when it cannot."""
    settings = load_settings(arguments, os.environ)
    config = settings.config
    check_beforehand(config)
    with _bound(config.host, config.port) as listener:
        _say(f"kvtier-serve: loading {config.model}")
        # Idle OpenMP threads sleep instead of spinning: the copies beside them need the cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Takes seconds, and the model more: a bad setting or a taken port is told before.
        with _interrupts():
            try:
                from kvtier_engine.program import run_server
                from kvtier_engine.serve import build
            except ImportError as error:
                raise import_problem(error, "kvtier-serve") from error
        # An interrupt that came meanwhile does not wait for the model.
        with _interrupts():
            server = build(settings)
        run_server(server, listener, _say)
    return EXIT_OK


@contextmanager
def _interrupts() -> Iterator[None]:
    """Lose no interrupt: raised in a callback of the import system, it would be ignored."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
        if seen:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


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


def _say(text: str) -> None:
    """Say it if anybody reads: a closed pipe must not end a server, nor keep it from draining."""
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
