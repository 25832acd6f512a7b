"""One file per object: what each operation asks of the file system. Every call may block.

::

    folder/3f0/00ffab….kv    an object: named by its key in hex, in one of 4096 folders by its hash
    folder/new/9d41….tmp     what is being written; renamed into its place when it is whole
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterator
from typing import Final

from kvtier.constants import KIB, MIB
from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.threads import Halt

#: In hex and with its ending a key must fit into 255 bytes, the longest name of a file.
KEY_BYTES_MAX: Final = 120
#: A file that is being written is left behind by a dead writer when it has not grown for so long.
STALE_S: Final = 3600.0
#: So many of them are looked at in one go.
STALE_FILES_MAX: Final = 1024
#: A cancelled operation ends after so many bytes.
STEP_BYTES: Final = 8 * MIB

#: What is read past the system's cache starts and ends at multiples of this.
PAGE_BYTES: Final = 4 * KIB

#: What an error of the file system means for a key. Any other is ``ConnectorUnavailableError``,
#: as are a lost folder (ENOENT), a stale handle (ESTALE) and a failing medium (EIO).
ERRORS: Final[dict[int, type[ConnectorError]]] = {
    errno.ENOSPC: ConnectorRefusedError,
    errno.EDQUOT: ConnectorRefusedError,
    errno.EFBIG: ConnectorRefusedError,
    errno.EROFS: ConnectorRefusedError,
    errno.EACCES: ConnectorRefusedError,
    errno.EPERM: ConnectorRefusedError,
    errno.ETIMEDOUT: ConnectorTimeoutError,
    errno.ELOOP: ConnectorDataError,
    errno.EISDIR: ConnectorDataError,
    errno.ESPIPE: ConnectorDataError,
    errno.EBADMSG: ConnectorDataError,
    errno.EUCLEAN: ConnectorDataError,
}

_ENDING: Final = ".kv"
_FOLDER_NAME: Final = re.compile(r"[0-9a-f]{3}")
_FILE_NAME: Final = re.compile(r"(?:[0-9a-f]{2})*\.kv")
# Nobody's symbolic link is followed, and nobody's pipe waited for.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# None where the system has no such thing.
_DIRECT_FLAG: Final = getattr(os, "O_DIRECT", 0)
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def translated(error: OSError) -> ConnectorError:
    """Return the outcome that an error of the file system is."""
    kind = ERRORS.get(error.errno or 0, ConnectorUnavailableError)
    return kind(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))


class Folder:
    """The files under a root that exists already. For several threads.

    Operations raise ``OSError``, and ``ConnectorError`` for what the file system does not know of.
    ``halt`` ends a long one early, with an error.
    """

    def __init__(self, root: str, *, sync: bool, direct: bool = False) -> None:
        """With ``direct`` reads pass the system's cache by, where file system and buffer let them.

        They do for a buffer and an offset at multiples of 4096, but for an object's last bytes.
        """
        self._root = root
        self._direct = direct
        self._new = f"{root}/new"
        self._sync = sync
        self._sweep_lock = threading.Lock()
        self._sweep_at = 0.0

    def contains(self, key: bytes) -> bool:
        """Tell whether the file is there."""
        if len(key) > KEY_BYTES_MAX:
            return False
        try:
            os.stat(self._path(key), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, request: ReadRequest, into: memoryview, halt: Halt) -> int | None:
        """Fill the buffer as far as the object reaches; None: it is not there."""
        if len(request.key) > KEY_BYTES_MAX:
            return None
        path = self._path(request.key)
        try:
            try:
                return _read_file(path, request.offset, into, halt, direct=self._direct)
            except OSError as error:
                # Another host replaced the file, whose inode the server has forgotten.
                if error.errno != errno.ESTALE:
                    raise
                return _read_file(path, request.offset, into, halt, direct=self._direct)
        except FileNotFoundError:
            # A miss, unless the root itself is gone.
            os.stat(self._root)
            return None

    def write(self, item: WriteItem, halt: Halt) -> None:
        """Write a new file, close it and rename it over the one that is there, if any."""
        if len(item.key) > KEY_BYTES_MAX:
            raise ConnectorRefusedError(
                f"a key of {len(item.key)} bytes; a file's name holds {KEY_BYTES_MAX}"
            )
        new = f"{self._new}/{secrets.token_hex(16)}.tmp"
        try:
            now = self._write_new(new, item.data, halt)
            self._place(new, self._path(item.key))
        except (OSError, ConnectorError):
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        self._sweep(now)

    def delete(self, key: bytes) -> None:
        """Remove the file if it is there."""
        if len(key) <= KEY_BYTES_MAX:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))

    def folders(self) -> list[str]:
        """Return the names of the folders that hold objects."""
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if _FOLDER_NAME.fullmatch(entry.name)]

    def objects(self, name: str, prefix: bytes) -> list[KeyInfo]:
        """Return what one of these folders holds; names of others are passed over."""
        found = []
        with os.scandir(f"{self._root}/{name}") as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name) and entry.name.startswith(prefix.hex()):
                    with contextlib.suppress(FileNotFoundError):
                        nbytes = entry.stat(follow_symlinks=False).st_size
                        found.append(KeyInfo(bytes.fromhex(entry.name[: -len(_ENDING)]), nbytes))
        return found

    def _path(self, key: bytes) -> str:
        # By hash, because keys may have a long beginning in common.
        spread = hashlib.blake2b(key, digest_size=2).hexdigest()[:3]
        return f"{self._root}/{spread}/{key.hex()}{_ENDING}"

    def _write_new(self, path: str, data: memoryview, halt: Halt) -> float:
        """Write and close; return the time as the file server has it."""
        try:
            file = os.open(path, _CREATE_FLAGS, 0o666)
        except FileNotFoundError:
            _make_folder(self._new)
            file = os.open(path, _CREATE_FLAGS, 0o666)
        try:
            _write_all(file, data, halt)
            if self._sync:
                os.fsync(file)
            return os.fstat(file).st_mtime
        finally:
            # Where a full or failing file server says so at the latest.
            os.close(file)

    def _place(self, new: str, path: str) -> None:
        folder = os.path.dirname(path)
        try:
            os.rename(new, path)
        except FileNotFoundError:
            _make_folder(folder)
            if self._sync:
                _sync_folder(self._root)
            os.rename(new, path)
        if self._sync:
            _sync_folder(folder)

    def _sweep(self, now: float) -> None:
        """Now and then remove what dead writers left; ``now`` is the file server's time."""
        with self._sweep_lock:
            if now < self._sweep_at:
                return
            self._sweep_at = now + STALE_S / 4
        with contextlib.suppress(OSError), os.scandir(self._new) as entries:
            for entry, _ in zip(entries, range(STALE_FILES_MAX), strict=False):
                # One that has gone meanwhile, or cannot be removed, says nothing of the others.
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < now - STALE_S:
                        os.unlink(entry.path)


def _read_file(path: str, offset: int, into: memoryview, halt: Halt, *, direct: bool) -> int:
    # One descriptor is one object, whatever is renamed over its name meanwhile.
    file = os.open(path, _READ_FLAGS)
    try:
        done = _read_direct(file, offset, into, halt) if direct and offset % PAGE_BYTES == 0 else 0
        for step in _steps(into[done:], halt):
            count = _read_step(file, offset + done, step)
            done += count
            if count < step.nbytes:
                break
        return done
    finally:
        os.close(file)


def _read_direct(file: int, offset: int, into: memoryview, halt: Halt) -> int:
    """Read what whole pages there are past the cache; return how much came, 0 where none may."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT_FLAG)
        for step in _steps(into[: into.nbytes - into.nbytes % PAGE_BYTES], halt):
            count = os.preadv(file, [step], offset + done)
            done += count
            if count < step.nbytes:
                break
    except OSError as error:
        # A file system without it, or memory or an offset that it does not take.
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


def _read_step(file: int, offset: int, into: memoryview) -> int:
    done = 0
    while done < into.nbytes:
        count = os.preadv(file, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _write_all(file: int, data: memoryview, halt: Halt) -> None:
    for step in _steps(data, halt):
        done = 0
        while done < step.nbytes:
            done += os.write(file, step[done:])


def _steps(data: memoryview, halt: Halt) -> Iterator[memoryview]:
    flat = data.cast("B")
    for start in range(0, flat.nbytes, STEP_BYTES):
        if halt.is_set():
            raise ConnectorUnavailableError("the call was given up")
        yield flat[start : start + STEP_BYTES]


def _make_folder(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _sync_folder(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
