"""A folder for what is expensive to derive from model files and cheap to derive again.

Everything in it is keyed by the identity of the files that it was derived from (path, inode, size,
modification time) and appears by an atomic rename after it has reached the disk, so a torn or stale
result is never used. It is bounded, by the number of results of a kind. Deleting the folder is
always safe.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

#: A folder that is being built is a dead builder's when its last file began so long ago.
STAGING_S_MAX: Final = 86_400.0


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


def cached_folder(kind: str, name: str, build: Callable[[Path], None], *, kept_max: int) -> Path:
    """Return the cached folder ``name`` of a kind; ``build`` fills a new one when there is none.

    Blocks while it builds. Two processes may build at once; the first to finish wins, and both
    return the same content. Of a kind so many folders are kept, those that were asked for last: who
    opens files of one does so soon after this has returned, and files that are open stay.
    """
    target = cache_folder() / kind / name
    if target.is_dir():
        with contextlib.suppress(OSError):  # Somebody else's, perhaps, and not for us to mark.
            os.utime(target)
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
    with contextlib.suppress(OSError):
        os.utime(target)
        _trim(target.parent, target.stat().st_mtime, kept_max)
    return target


def _trim(folder: Path, now: float, kept_max: int) -> None:
    """Remove what was not asked for longest, and what dead builders left; raises ``OSError``."""
    ages = {path: now - path.stat().st_mtime for path in folder.iterdir() if path.is_dir()}
    whole = sorted((path for path in ages if not path.name.startswith(".")), key=ages.__getitem__)
    for path in whole[kept_max:]:
        # First out of sight: nobody shall find half of it.
        gone = path.with_name(f".{path.name[:16]}-{os.urandom(4).hex()}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    for path in ages.keys() - set(whole):
        if ages[path] > STAGING_S_MAX:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
