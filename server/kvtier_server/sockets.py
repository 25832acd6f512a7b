"""Binding addresses, before memory is taken: one that is in use is told at once. Descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier_server.settings import Address


@contextmanager
def bound(option: str, address: Address, *, mode: int = 0o600) -> Iterator[socket.socket]:
    """Bind without listening: clients are refused until there is somebody to answer.

    ``mode`` is that of a Unix socket, which is removed in the end. Raises ``ConfigError`` that
    names ``option``.
    """
    try:
        listener = _bound_unix(address.path, mode) if address.path else _bound_tcp(address)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{option} = '{address}': cannot listen: {why}") from error
    try:
        with listener:
            yield listener
    finally:
        if address.path:
            Path(address.path).unlink(missing_ok=True)


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as the system allows it; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _bound_tcp(address: Address) -> socket.socket:
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
    except OSError:
        listener.close()
        raise
    return listener


def _bound_unix(path: str, mode: int) -> socket.socket:
    """Bind a socket that nobody else could open for a moment."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o777 & ~mode)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on; leave anything else, so that binding fails."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise OSError(errno.EEXIST, "there is a file of that name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise OSError(errno.EADDRINUSE, "somebody listens there")
