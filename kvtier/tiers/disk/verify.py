"""Reading a whole disk tier and holding every byte against what its shards say of themselves.

For a directory at rest. One that is in use may be read too: what its owner removes meanwhile is
passed over, and what it is just writing lies in ``incoming`` as it should.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvtier.constants import SHARD_BYTES_MAX
from kvtier.errors import FormatError, ShardError
from kvtier.keys import shard_key
from kvtier.shard_format import ShardHeader, parse_header, verify_section
from kvtier.tiers.disk.files import FileInfo, FileSystem
from kvtier.tiers.disk.journal import Journal
from kvtier.tiers.disk.scan import check_file
from kvtier.types import ChunkKey


class Problem(StrEnum):
    """What is wrong with a file, and with that what a repair does with it."""

    CORRUPT = "corrupt"  # quarantined
    TWIN = "twin"  # an older file of a shard that was written again: removed
    ORPHAN = "orphan"  # no lookup can reach it, for its parent is not there: removed
    LEFTOVER = "leftover"  # was being written when its writer ended: removed
    INDEX = "index"  # cannot be trusted, so that a start reads all headers: removed


@dataclass(frozen=True, slots=True)
class Finding:
    """One file in trouble."""

    path: str
    nbytes: int
    problem: Problem
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was read. ``nbytes`` counts sound shards."""

    sound_shards: int
    nbytes: int
    quarantined_files: int
    findings: tuple[Finding, ...]


class Verifier:
    """Reads a directory file by file; ``verdict`` is complete when ``run`` is exhausted."""

    def __init__(self, root: str, files: FileSystem) -> None:
        self._root = os.path.abspath(root)
        self._files = files
        self._buffer = memoryview(b"")
        self._sound: dict[bytes, tuple[FileInfo, ShardHeader]] = {}
        self._findings: list[Finding] = []

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield (bytes read so far, bytes in all) after each file. Raises ``OSError``."""
        shards = sorted(self._files.list(self._path("shards")), key=lambda info: info.path)
        total = sum(info.nbytes for info in shards)
        done = 0
        for info in shards:
            self._judge(info)
            done += info.nbytes
            yield done, total
        for info in self._files.list(self._path("incoming")):
            self._find(info, Problem.LEFTOVER, "was being written")
        self._find_orphans()
        self._judge_index()

    @property
    def verdict(self) -> Verdict:
        """What has been found so far."""
        return Verdict(
            sound_shards=len(self._sound),
            nbytes=sum(info.nbytes for info, _ in self._sound.values()),
            quarantined_files=len(self._files.list(self._path("quarantine"))),
            findings=tuple(self._findings),
        )

    def repair(self) -> None:
        """Quarantine what is corrupt and remove what is useless. Nobody else uses the directory.

        Raises ``OSError`` at the first file that cannot be moved.
        """
        for finding in self._findings:
            if finding.problem is Problem.CORRUPT:
                target = self._path("quarantine", os.path.basename(finding.path))
                self._files.replace(finding.path, target)
            else:
                self._files.remove(finding.path)
        if self._findings:  # What it says of these files is not true any more.
            for info in self._files.list(self._path("index")):
                self._files.remove(info.path)

    def _judge_index(self) -> None:
        for info in self._files.list(self._path("index")):
            is_snapshot = os.path.basename(info.path) == "snapshot"
            if is_snapshot and Journal(self._root, self._files).load() is None:
                self._find(info, Problem.INDEX, "cannot be trusted")

    def _judge(self, info: FileInfo) -> None:
        try:
            header = self._read(info)
        except FileNotFoundError:
            return
        except (ShardError, OSError) as error:
            self._find(info, Problem.CORRUPT, str(error))
            return
        key = shard_key(header.chunk, header.shard)
        if key in self._sound:  # Sorted by name, so this one is the later generation.
            self._find(self._sound[key][0], Problem.TWIN, f"written again as {info.path}")
        self._sound[key] = (info, header)

    def _read(self, info: FileInfo) -> ShardHeader:
        if not 0 < info.nbytes <= SHARD_BYTES_MAX:
            raise FormatError(f"{info.path} has {info.nbytes} bytes, which no shard has")
        if len(self._buffer) < info.nbytes:
            mapping = mmap.mmap(-1, info.nbytes)
            mapping.madvise(mmap.MADV_HUGEPAGE)
            self._buffer = memoryview(mapping)
        data = self._buffer[: info.nbytes]
        if self._files.read(info.path, 0, data) != info.nbytes:
            raise FormatError(f"{info.path} ends before byte {info.nbytes}")
        header = parse_header(data)
        check_file(header, info)
        for section in range(len(header.section_bytes)):
            verify_section(data, header, section)
        return header

    def _find_orphans(self) -> None:
        chunks: dict[ChunkKey, ChunkKey | None] = {
            header.chunk: header.parent for _, header in self._sound.values()
        }
        reachable: dict[ChunkKey | None, bool] = {None: True}
        for chunk in chunks:
            line: list[ChunkKey] = []
            above: ChunkKey | None = chunk
            while above is not None and above not in reachable:
                line.append(above)
                reachable[above] = False  # Until its line is followed; parents in a ring stay so.
                above = chunks.get(above, above)
            found = reachable.get(above, False)
            reachable.update(dict.fromkeys((key for key in line if key in chunks), found))
        for key in [k for k, (_, header) in self._sound.items() if not reachable[header.chunk]]:
            info, header = self._sound.pop(key)
            parent = header.parent.hex() if header.parent else ""
            self._find(info, Problem.ORPHAN, f"its parent {parent[:16]} is not there")

    def _find(self, info: FileInfo, problem: Problem, detail: str) -> None:
        self._findings.append(Finding(info.path, info.nbytes, problem, detail))

    def _path(self, *parts: str) -> str:
        return os.path.join(self._root, *parts)
