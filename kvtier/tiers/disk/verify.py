"""Reading a whole disk tier and holding every byte against what its shards say of themselves.

For directories at rest. Those in use may be read too: what their owner removes meanwhile is
passed over, and what it is just writing lies in ``incoming`` as it should. The directories of one
tier are read together, since a chunk and its parent may lie in different ones.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.constants import SHARD_BYTES_MAX
from kvtier.errors import FormatError, MissingExtraError, RegistryError, ShardError
from kvtier.keys import shard_key
from kvtier.shard_format import ShardHeader, shard_geometry, verify_section
from kvtier.stored_shard import (
    StoredHeader,
    decode_section,
    first_bytes,
    parse_stored,
    verify_stored,
)
from kvtier.tiers.decoding import ByteCodecs
from kvtier.tiers.disk.files import FileInfo, FileSystem
from kvtier.tiers.disk.journal import Journal
from kvtier.tiers.disk.scan import check_file, file_header
from kvtier.tiers.scratch import Scratch
from kvtier.types import ChunkKey


class Problem(StrEnum):
    """What is wrong with a file, and with that what a repair does with it."""

    CORRUPT = "corrupt"  # quarantined
    TWIN = "twin"  # an older file of a shard that was written again: removed
    ORPHAN = "orphan"  # its parent is not there; of use again when that is stored again: kept
    LEFTOVER = "leftover"  # was being written when its writer was killed: removed, here or at open
    INDEX = "index"  # cannot be trusted, so that a start reads all headers: removed
    CALIBRATION = "calibration"  # damaged, or a pointer to none that is sound: set aside


_HARMLESS = frozenset({Problem.LEFTOVER, Problem.ORPHAN})


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

    @property
    def clean(self) -> bool:
        """True when nothing is wrong.

        What a killed writer leaves in ``incoming`` is as it must be: no name leads there, and the
        next open removes it. An orphan is sound: its parent may lie in another directory.
        """
        return all(finding.problem in _HARMLESS for finding in self.findings)


class Verifier:
    """Reads the directories of a tier file by file, one thread, blocking.

    ``verdict`` is complete when ``run`` is exhausted.
    """

    def __init__(self, roots: Sequence[str], files: FileSystem) -> None:
        """``roots`` are all directories of one tier: what hangs below a missing one is orphaned."""
        self._roots = [os.path.abspath(root) for root in roots]
        self._files = files
        self._buffer = memoryview(b"")
        self._scratch = Scratch()
        self._codecs = ByteCodecs()
        self._sound: dict[bytes, tuple[FileInfo, ShardHeader]] = {}
        self._findings: list[Finding] = []

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield (bytes read so far, bytes in all) after each file. Raises ``OSError``."""
        # By name, whatever the directory: of two files of one shard the later one was written last.
        shards = sorted(self._list("shards"), key=lambda info: os.path.basename(info.path))
        total = sum(info.nbytes for info in shards)
        done = 0
        for info in shards:
            self._judge(info)
            done += info.nbytes
            yield done, total
        for info in self._list("incoming"):
            self._find(info, Problem.LEFTOVER, "was being written")
        self._find_orphans()
        self._judge_index()

    @property
    def verdict(self) -> Verdict:
        """What has been found so far."""
        return Verdict(
            sound_shards=len(self._sound),
            nbytes=sum(info.nbytes for info, _ in self._sound.values()),
            quarantined_files=len(self._list("quarantine")),
            findings=tuple(self._findings),
        )

    def repair(self) -> None:
        """Quarantine what is corrupt and remove what is useless. Nobody else uses the tier.

        Raises ``OSError`` at the first file that cannot be moved.
        """
        for finding in self._findings:
            if finding.problem is Problem.CORRUPT:
                name = os.path.basename(finding.path)
                target = os.path.join(self._root_of(finding.path), "quarantine", name)
                self._files.replace(finding.path, target)
            elif finding.problem is not Problem.ORPHAN:
                self._files.remove(finding.path)
        # What an index says of these files is not true any more.
        mended = (f for f in self._findings if f.problem not in _HARMLESS)
        touched = {self._root_of(finding.path) for finding in mended}
        for info in self._list("index"):
            if self._root_of(info.path) in touched:
                self._files.remove(info.path)

    def _judge_index(self) -> None:
        for info in self._list("index"):
            if os.path.basename(info.path) == "snapshot":
                journal = Journal(self._root_of(info.path), self._files)
                if journal.load() is None:
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
        header = file_header(data)
        check_file(header, info)
        if first_bytes(data)[1]:
            self._decode(data, parse_stored(data))
        else:
            for section in range(len(header.shard.section_bytes)):
                verify_section(data, header.shard, section)
        return header.shard

    def _decode(self, data: memoryview, stored: StoredHeader) -> None:
        """Verify what is stored, and what comes of it where its byte codec is installed."""
        with self._scratch.lent(shard_geometry(stored.header.section_bytes).shard_bytes) as shard:
            for section in range(len(stored.encoding.section_bytes)):
                verify_stored(data, stored, section)
                try:
                    codec = self._codecs.get(stored.encoding.byte_codec)
                    decode_section(data, stored, section, codec, shard)
                except (MissingExtraError, RegistryError):
                    continue

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

    def _list(self, folder: str) -> list[FileInfo]:
        found: list[FileInfo] = []
        for root in self._roots:
            found += self._files.list(os.path.join(root, folder))
        return found

    def _root_of(self, path: str) -> str:
        # The deepest one, should a directory lie within another.
        return max((r for r in self._roots if path.startswith(os.path.join(r, ""))), key=len)
