"""The process that is killed: a cache that stores, evicts and reclaims until the end.

``python -m tests.lib.kill_child`` imports everything once, then forks a child for each line of
JSON that it is told, and says ``ended`` when it is dead. A child reports what it does to shard
files: ``+PATH`` once a file has its name, ``-PATH`` before it is removed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from kvtier.cache.cache import Cache
from kvtier.cache.planner import chunk_shape
from kvtier.codecs.raw import RawCodec
from kvtier.config import CacheConfig, DiskConfig, Durability, WriteMode
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.disk import journal
from kvtier.tiers.disk.files import LocalFiles
from tests.lib.kill_engine import CHUNK_TOKENS, LAYOUT, PatternEngine

DRAM_CHUNKS = 10
DISK_CHUNKS = 24
CHAINS = 16
CHAIN_CHUNKS = 4
CHUNK_BYTES = chunk_shape(LAYOUT, RawCodec()).chunk_bytes


@dataclass(frozen=True)
class Job:
    """What a child does. ``changes_logged`` is how long the index's log grows."""

    seed: int
    folders: tuple[str, ...]
    changes_logged: int
    durability: str = Durability.NONE
    mode: str = WriteMode.THROUGH
    policy: str = "lru"
    byte_codec: str | None = None

    def text(self) -> str:
        """Return one line for the child."""
        return json.dumps(asdict(self))

    def config(self, dram_chunks: int = DRAM_CHUNKS) -> CacheConfig:
        """Return the settings of a cache over the job's folders."""
        first, *more = self.folders
        disk = DiskConfig(
            first,
            DISK_CHUNKS * CHUNK_BYTES,
            Durability(self.durability),
            WriteMode(self.mode),
            self.policy,
            more_paths=tuple(more),
            byte_codec=self.byte_codec,
        )
        return CacheConfig(dram_bytes=dram_chunks * CHUNK_BYTES, disk=disk, slab_bytes=4096)


def chain(number: int, chunks: int = CHAIN_CHUNKS) -> range:
    """Return the tokens of one of the sequences."""
    start = 1000 * number
    return range(start, start + chunks * CHUNK_TOKENS)


class TellingFiles(LocalFiles):
    """The local file system, which reports what becomes of shards."""

    def replace(self, source: str, target: str) -> None:
        if _is_shard(source):
            _tell(f"-{source}")
        super().replace(source, target)
        if _is_shard(target):
            _tell(f"+{target}")

    def remove(self, path: str) -> None:
        if _is_shard(path):
            _tell(f"-{path}")
        super().remove(path)


def _is_shard(path: str) -> bool:
    return Path(path).parents[1].name == "shards"


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def work(job: Job) -> None:
    """Store and load random sequences, for ever."""
    mock.patch.object(journal, "JOURNAL_CHANGES_LOGGED", job.changes_logged).start()
    draws = random.Random(job.seed)
    cache = Cache(job.config(), files=TellingFiles())
    engine = PatternEngine(cache)
    while True:
        tokens = chain(draws.randrange(CHAINS), draws.randint(1, CHAIN_CHUNKS))
        engine.load(engine.match(tokens))
        engine.store(tokens)
        if draws.random() < 0.5:
            wait_until(lambda: not cache.stats().writes_queued or job.mode == "back", "no write")


def main() -> None:
    """Fork one child after the other, as told."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            values = json.loads(line)
            work(Job(**values | {"folders": tuple(values["folders"])}))
        _tell(str(pid))
        _, status = os.waitpid(pid, 0)
        _tell(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
