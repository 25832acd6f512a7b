"""A file system that forgets what was not synced when the power goes.

Stricter than most real ones: a name is safe once its directory was synced, a directory once its
parent was, and bytes once their file was. Whatever is not safe may come back as it was, as it is
or, for bytes, torn; a seed draws which. A rename takes effect whole or not at all. What an append
adds is torn at any byte, what was synced before it stays.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Final

from kvtier.tiers.disk.files import FileInfo, FileSystem, LocalFiles

_SECTOR_BYTES: Final = 512


class PowerCutFiles:
    """A ``FileSystem`` around another one, for everything below one directory.

    ``shadow`` is an empty directory of the same disk, outside ``root``: every file that was made
    is kept there by a second link, so that a removal can be undone. A sync makes safe here and
    costs no real one. Safe from any thread.
    """

    def __init__(
        self,
        root: str | Path,
        shadow: str | Path,
        *,
        seed: int = 0,
        inner: FileSystem | None = None,
    ) -> None:
        """Take what lies below ``root`` now as safe."""
        self._root = Path(root).absolute()
        self._shadow = Path(shadow)
        self._inner = inner if inner is not None else LocalFiles()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._number = 0
        self._names: dict[str, int] = {}  # path to number in the shadow: as it is
        self._safe_names: dict[str, int] = {}  # and as it would be after a cut
        self._safe_bytes: set[int] = set()
        self._safe_lengths: dict[int, int] = {}  # of what was appended to and not synced since
        self._moved_from: dict[str, str] = {}  # renames that are not safe, by target
        self._safe_directories = {str(self._root)}
        for directory, _, names in os.walk(self._root):
            self._safe_directories.add(directory)
            for name in names:
                self._adopt(str(Path(directory, name)))

    def list(self, directory: str) -> list[FileInfo]:
        """See ``Files.list``."""
        return self._inner.list(directory)

    def read(self, path: str, offset: int, into: memoryview) -> int:
        """See ``Files.read``."""
        return self._inner.read(path, offset, into)

    def create(self, path: str, data: memoryview) -> None:
        """See ``Files.create``."""
        with self._lock:
            try:
                self._inner.create(path, data)
            finally:
                if Path(path).exists() and path not in self._names:
                    self._names[path] = self._link(path)

    def replace(self, source: str, target: str) -> None:
        """See ``Files.replace``."""
        with self._lock:
            self._inner.replace(source, target)
            number = self._names.pop(source, None)
            self._names[target] = self._link(target) if number is None else number
            self._moved_from[target] = self._moved_from.pop(source, source)

    def remove(self, path: str) -> None:
        """See ``Files.remove``."""
        with self._lock:
            self._inner.remove(path)
            self._names.pop(path, None)
            self._moved_from.pop(path, None)

    def sync_file(self, path: str) -> None:
        """See ``Syncs.sync_file``."""
        with self._lock:
            if path not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._safe_bytes.add(self._names[path])
            self._safe_lengths.pop(self._names[path], None)

    def sync_directory(self, path: str) -> None:
        """See ``Syncs.sync_directory``."""
        with self._lock:
            for name in self._unsafe_names():
                if str(Path(name).parent) == path:
                    self._make_safe(name)
            self._safe_directories |= {
                str(child) for child in Path(path).iterdir() if child.is_dir()
            }

    def append(self, path: str, data: memoryview) -> None:
        """See ``Appends.append``."""
        with self._lock:
            number = self._names.get(path)
            length = Path(path).stat().st_size if number in self._safe_bytes else 0
            try:
                self._inner.append(path, data)
            finally:
                if number is None and Path(path).exists():
                    number = self._names[path] = self._link(path)
                if number is not None:
                    self._safe_bytes.discard(number)
                    self._safe_lengths.setdefault(number, length)

    def cut(self) -> None:
        """Lose the power, and come back with what survived; nobody may be using the files."""
        with self._lock:
            for name in self._unsafe_names():
                if self._random.random() < 0.5:
                    self._make_safe(name)
            above = {str(d) for name in self._safe_names for d in Path(name).parents}
            unsafe = {
                d for d in above - self._safe_directories if Path(d).is_relative_to(self._root)
            }
            lost = {d for d in sorted(unsafe) if self._random.random() < 0.5}
            for name in self._names:
                Path(name).unlink(missing_ok=True)
            kept = sorted(self._safe_names.items())
            self._names, self._safe_names, self._moved_from = {}, {}, {}
            for name, number in kept:
                if lost.isdisjoint(str(parent) for parent in Path(name).parents):
                    self._bring_back(name, number)

    def _adopt(self, name: str) -> None:
        self._names[name] = self._safe_names[name] = self._link(name)
        self._safe_bytes.add(self._names[name])

    def _link(self, name: str) -> int:
        self._number += 1
        os.link(name, self._shadow / str(self._number))
        return self._number

    def _unsafe_names(self) -> tuple[str, ...]:
        """Return what a cut may undo. A file's former name follows its present one."""
        names = self._names.keys() | self._safe_names.keys()
        former = set(self._moved_from.values()) - self._names.keys()
        return tuple(
            n for n in sorted(names - former) if self._names.get(n) != self._safe_names.get(n)
        )

    def _make_safe(self, name: str) -> None:
        number = self._names.get(name)
        source = self._moved_from.pop(name, None)
        if number is None:
            self._safe_names.pop(name, None)
            return
        self._safe_names[name] = number
        if source is not None and self._safe_names.get(source) == number:
            del self._safe_names[source]

    def _bring_back(self, name: str, number: int) -> None:
        """Put a file that survived in its place, its bytes torn unless they were safe."""
        path, kept = Path(name), self._shadow / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._safe_directories |= {str(parent) for parent in path.parents}
        way = 0 if number in self._safe_bytes else self._random.randrange(3)
        data = bytearray(kept.read_bytes()) if way else bytearray()
        if way == 0 or not data:
            os.link(kept, path)
        else:
            start = self._safe_lengths.get(number, 0)
            step = 1 if number in self._safe_lengths else _SECTOR_BYTES
            torn = start + self._random.randrange((len(data) - start) // step + 1) * step
            if way == 1:
                del data[torn:]
            else:
                data[torn : torn + _SECTOR_BYTES] = bytes(len(data[torn:][:_SECTOR_BYTES]))
            path.write_bytes(data)
        self._adopt(name)
