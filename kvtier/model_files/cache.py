"""A folder for what is expensive to derive from model files and cheap to derive again.

Everything in it is keyed by the identity of the files that it was derived from (path, inode, size,
modification time) and appears by an atomic rename after it has reached the disk, so a torn or stale
result is never used. Deleting the folder is always safe.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kvtier``, by default ``~/.cache/kvtier``; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtier"


def file_identity(files: Sequence[Path], purpose: str) -> str:
    """Return a name for a result of ``purpose`` derived from ``files`` as they are now."""
    digest = hashlib.sha256(purpose.encode())
    for file in files:
        state = file.stat()
        digest.update(
            f"\0{file.resolve()}\0{state.st_ino}\0{state.st_size}\0{state.st_mtime_ns}".encode()
        )
    return digest.hexdigest()


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder ``name``; ``build`` fills a new one when there is none.

    Blocks while it builds. Two processes may build at once; the first to finish wins, and both
    return the same content.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:16]}-", dir=target.parent))
    try:
        build(staging)
        for file in staging.iterdir():
            _sync(file)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
