"""A folder whose n-th system call goes wrong, for every n: outcomes, and never a wrong byte."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConnectorDataError, ConnectorError
from kvtier.interfaces import Connector
from kvtier.testing.connector_script import Script
from kvtier.types import ReadRequest
from kvtier_connectors.decorators.encrypted import Encrypted
from kvtier_connectors.files import FileConnector, folder
from tests.lib.one_key import OneKey

#: Small, so that objects of several steps are.
STEP_BYTES = 1 << 16
SIZES = {b"small": 100, b"middle": 50_000, b"large": STEP_BYTES + 5000}
REQUESTS = [ReadRequest(key, 0, nbytes) for key, nbytes in SIZES.items()]
REQUESTS.append(ReadRequest(b"large", STEP_BYTES - 100, 3000))
CALLS = (
    *("open", "close", "write", "preadv", "stat", "fstat", "mkdir", "rename", "unlink"),
    *("scandir", "fsync"),
)

#: Does a call of that name in its own way, or refuses to.
Act = Callable[[Callable[..., Any], str, tuple[Any, ...]], Any]


class Meddler:
    """Counts the system calls of a connector's threads, and lets one of them go wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: What has been called, in its order.
        self.names: list[str] = []
        self._at = 0
        self._act: Act | None = None
        for name in CALLS:
            # To flush takes most of the time, and nobody pulls a plug here.
            real = (lambda file: None) if name == "fsync" else getattr(os, name)
            monkeypatch.setattr(os, name, self._meddling(name, real))

    def begin(self, at: int = 0, act: Act | None = None) -> None:
        """Count anew; the call of that number, from 1, is for ``act``."""
        self.names, self._at, self._act = [], at, act

    def _meddling(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not threading.current_thread().name.startswith("kvtier-file"):
                return real(*args, **options)
            self.names.append(name)
            if self._act is not None and len(self.names) == self._at:
                return self._act(real, name, args)
            return real(*args, **options)

        return call


@pytest.fixture
def meddler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meddler]:
    monkeypatch.setattr(folder, "STEP_BYTES", STEP_BYTES)
    yield Meddler(monkeypatch)
    monkeypatch.undo()


def failing(code: int) -> Act:
    def act(real: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
        if name == "close":  # As on NFS: it is closed, and what was written is lost.
            real(*args)
        raise OSError(code, os.strerror(code))

    return act


def short(real: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """Read or write less than was asked for, at least one byte."""
    if name == "write":
        return real(args[0], args[1][: max(1, len(args[1]) // 3)])
    if name == "preadv":
        (buffer,) = args[1]
        return real(args[0], [buffer[: max(1, len(buffer) // 3)]], args[2])
    return real(*args)


def garbled(real: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """Read or write other bytes than there are."""
    if name == "write":
        return real(args[0], bytes(each ^ 1 for each in args[1][:1]) + bytes(args[1][1:]))
    answer = real(*args)
    if name == "preadv" and answer:
        (buffer,) = args[1]
        buffer[answer // 2] ^= 1
    return answer


def new_connector(place: Path) -> FileConnector:
    place.mkdir()
    return FileConnector(place, sync="each", threads=1)


async def act_out(meddler: Meddler, connector: Connector, at: int, act: Act | None) -> Script:
    """Run a script while one call goes wrong, then another, which must go well."""
    marred, again = Script(SIZES, REQUESTS), Script(SIZES, REQUESTS)
    meddler.begin(at, act)
    await marred.run(connector)
    names = meddler.names
    meddler.begin()
    await again.run(connector)
    again.assert_well()
    assert again.listed == SIZES
    await connector.close()
    assert at <= len(names)
    return marred


async def names_of_a_script(meddler: Meddler, connector: Connector) -> list[str]:
    """Return the calls of a script that goes well."""
    script = Script(SIZES, REQUESTS)
    meddler.begin()
    await script.run(connector)
    script.assert_well()
    await connector.close()
    return meddler.names


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ENOENT])
async def test_whichever_call_fails_others_are_spared(
    meddler: Meddler, tmp_path: Path, code: int
) -> None:
    names = await names_of_a_script(meddler, new_connector(tmp_path / "well"))
    assert {"open", "close", "write", "preadv", "rename", "unlink", "scandir"} <= set(names)
    for at in range(1, len(names) + 1):
        connector = new_connector(tmp_path / str(at))
        marred = await act_out(meddler, connector, at, failing(code))
        faults = [*marred.written, *marred.read]
        assert sum(isinstance(fault, ConnectorError) for fault in faults) <= 1


async def test_b85_whichever_read_or_write_is_short_nobody_notices(
    meddler: Meddler, tmp_path: Path
) -> None:
    names = await names_of_a_script(meddler, new_connector(tmp_path / "well"))
    for at, name in enumerate(names, 1):
        if name in {"write", "preadv"}:
            marred = await act_out(meddler, new_connector(tmp_path / str(at)), at, short)
            marred.assert_well()


async def test_b78_whatever_is_garbled_is_found_by_encryption(
    meddler: Meddler, tmp_path: Path
) -> None:
    def encrypted(name: str) -> Connector:
        return Encrypted(new_connector(tmp_path / name), OneKey(), "tenant")

    names = await names_of_a_script(meddler, encrypted("well"))
    errors = 0
    for at, name in enumerate(names, 1):
        if name in {"write", "preadv"}:
            marred = await act_out(meddler, encrypted(str(at)), at, garbled)
            errors += any(isinstance(outcome, ConnectorDataError) for outcome in marred.read)
    assert errors > 5
