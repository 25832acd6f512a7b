"""Brings what LMCache kept in a folder into KVTier, to be found by the L2 adapter."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from kvtier.constants import KEYED_BATCH_MAX
from kvtier.errors import ConfigError, DeadlineError
from kvtier.types import Tier
from kvtier_adapters.lmcache.files import FileKey, file_key
from kvtier_adapters.lmcache.limits import IMPORT_BATCH_BYTES, IMPORT_FILES_MAX, IMPORT_WAIT_S
from kvtier_adapters.lmcache.naming import L2_SCHEME, layout_bytes, object_name, seal
from kvtier_adapters.payloads.limits import PAUSE_S_MAX
from kvtier_adapters.payloads.store import Face, PlugStore


@dataclass(slots=True)
class ImportReport:
    """What came of an import, in files. ``held``: of ``stored``, those a tier still has."""

    found: int = 0
    stored: int = 0
    held: int = 0
    bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    key: FileKey
    mtime_ns: int


def import_folder(
    folder: Path,
    store: PlugStore,
    layout: str,
    progress: Callable[[int, int], None],
) -> ImportReport:
    """Read every object of ``layout`` in a folder and keep it; the folder is left as it is.

    The oldest come first, so that the newest stay where not all have room. Taken is a regular
    file with a name of LMCache's and the size of the layout, that does not change while it is
    read and is not all zeros, as a torn file may be. LMCache keeps no checksums: a bit that fell
    on its disk is not found here; from now on it is. LMCache must not run on the folder, as it may
    write there. Needs ``IMPORT_BATCH_BYTES`` of memory, or one object.

    Blocks; ``progress`` is told files done and files in all. Raises ``ConfigError`` for a layout
    that is none, a folder that is not there, or a store that keeps nothing, and ``DeadlineError``
    where nothing more can be written.
    """
    nbytes = layout_bytes(layout)
    if not store.options.disk and not store.options.remote:
        raise ConfigError("an import needs a disk or a remote: DRAM ends with the process")
    report, face = ImportReport(), store.face(L2_SCHEME)
    files = _listed(folder, nbytes, report)
    _await_disk(store)
    count = max(1, min(IMPORT_BATCH_BYTES // max(nbytes, 1), KEYED_BATCH_MAX, len(files) or 1))
    room = [memoryview(bytearray(nbytes)) for _ in range(count)]
    mark = seal(nbytes, layout)
    names: list[bytes] = []
    done = 0
    for batch in _batches(files, count):
        items = []
        for one, buffer in zip(batch, room, strict=False):
            reason = _read(one, buffer)
            if reason is None:
                items.append((object_name(one.key), (buffer, mark)))
            else:
                report.left_out[reason] += 1
        kept = store.run(face.put(items))
        _await_writes(store)
        names += (name for (name, _), there in zip(items, kept, strict=True) if there)
        report.left_out["no room"] += kept.count(False)
        report.stored, report.bytes = len(names), len(names) * nbytes
        done += len(batch)
        progress(done, len(files))
    report.held = _held(face, store, names)
    report.left_out = +report.left_out
    return report


def _listed(folder: Path, nbytes: int, report: ImportReport) -> list[_File]:
    """The files to read, the oldest first."""
    files: list[_File] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                key = file_key(entry.name)
                if key is None:
                    continue
                report.found += 1
                if report.found > IMPORT_FILES_MAX:
                    raise ConfigError(f"{folder} has more than {IMPORT_FILES_MAX} objects")
                if not entry.is_file(follow_symlinks=False):
                    report.left_out["no regular file"] += 1
                    continue
                about = entry.stat(follow_symlinks=False)
                if about.st_size != nbytes:
                    report.left_out["another size"] += 1
                else:
                    files.append(_File(entry.path, key, about.st_mtime_ns))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    files.sort(key=lambda one: one.mtime_ns)
    return files


def _read(one: _File, buffer: memoryview) -> str | None:
    """Fill a buffer from a file; return why it is left out, None if it is not."""
    try:
        with open(one.path, "rb", buffering=0, opener=_open_plain) as file:
            done = 0
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
            about = os.fstat(file.fileno())
    except OSError:
        return "unreadable"
    if done != len(buffer) or (about.st_size, about.st_mtime_ns) != (done, one.mtime_ns):
        return "changed meanwhile"
    return None if np.frombuffer(buffer, np.uint8).any() else "all zeros"


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _await_disk(store: PlugStore) -> None:
    """Wait until the disk is open, so that what it holds already is seen."""

    def opening() -> bool:
        tiers = store.cache.stats().tiers
        return any(tier.tier is Tier.DISK and tier.state == "opening" for tier in tiers)

    _await(store, opening, "the disk was not opened")
    broken = [tier for tier in store.cache.stats().tiers if tier.state != "ok"]
    if broken:
        raise ConfigError(f"the {broken[0].tier} tier is {broken[0].state}: {broken[0].detail}")


def _await_writes(store: PlugStore) -> None:
    _await(store, lambda: store.cache.stats().writes_queued > 0, "what was read was not written")


def _await(store: PlugStore, waits: Callable[[], bool], otherwise: str) -> None:
    deadline = store.clock.now() + IMPORT_WAIT_S
    while waits():
        if store.clock.now() >= deadline:
            raise DeadlineError(f"{otherwise} within {IMPORT_WAIT_S:g} s")
        store.clock.sleep(PAUSE_S_MAX)


def _held(face: Face, store: PlugStore, names: Sequence[bytes]) -> int:
    return sum(store.run(face.lookup(names)))


def _batches(files: Sequence[_File], count: int) -> Iterator[list[_File]]:
    rest = iter(files)
    while batch := list(islice(rest, count)):
        yield batch
