"""What is packed for the disk alone cannot be evicted, so DRAM keeps little of it, and not long."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.config import CacheConfig, DiskConfig, WriteMode
from kvtier.constants import KIB, MIB, STAGED_CHUNKS_MAX
from kvtier.errors import CodecError
from kvtier.obs.stats import TierStats
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileGate, FileOperation
from kvtier.types import Blocks, Fidelity, GroupKind, KVGroup, KVLayout, Namespace, Plan, Result

CHUNK = 32
WRITES = (FileOperation.CREATE, FileOperation.APPEND)


def namespace(dtype: str = "float32") -> Namespace:
    group = KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype=dtype)
    return Namespace("weights", KVLayout((group,), chunk_tokens=CHUNK), fidelity=Fidelity.LOSSY)


class Room:
    """A cache whose worker's answers are made up: it looks at the books alone."""

    def __init__(
        self, folder: Path, codec: str = "int8", mode: WriteMode = WriteMode.THROUGH
    ) -> None:
        self.files = FaultyFiles()
        disk = DiskConfig(str(folder), 64 * MIB, mode=mode, codec="int5k4v")
        config = CacheConfig(4 * MIB, disk, codec=codec, slab_bytes=64 * KIB)
        self.cache = Cache(config, files=self.files)
        wait_until(self._open, "the disk")

    def _open(self) -> bool:
        return isinstance(self.cache.match(self.cache.sequence(namespace())), Ready)

    def sequence(self, first: int, chunks: int) -> Sequence:
        sequence = self.cache.sequence(namespace())
        sequence.append(range(first, first + chunks * CHUNK))
        return sequence

    def begin(self, sequence: Sequence) -> Plan:
        chunks = len(sequence.chunk_keys)
        plan = self.cache.begin_store(
            sequence, range(chunks), Blocks(0, (tuple(range(chunks)),), CHUNK)
        )
        assert plan is not None
        return plan

    def store(self, first: int, chunks: int) -> None:
        self.cache.finish([Result(self.begin(self.sequence(first, chunks)).plan_id, 0, ok=True)])

    def dram(self) -> TierStats:
        return self.cache.stats().tiers[0]

    def written(self) -> None:
        wait_until(lambda: not self.cache.stats().writes_queued, "the disk")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.files.inject()
    room.cache.check_integrity()
    room.cache.close()


def test_one_long_store_is_staged_in_part(room: Room) -> None:
    plan = room.begin(room.sequence(0, 2 * STAGED_CHUNKS_MAX))
    codecs = [move.codec for move in plan.moves]
    assert codecs.count("int8") == 2 * STAGED_CHUNKS_MAX
    assert codecs.count("int5k4v") == STAGED_CHUNKS_MAX
    room.cache.finish([Result(plan.plan_id, 0, ok=True)])
    room.written()
    assert room.dram().pinned_chunks == 0


def test_b110_a_full_disk_pins_nothing(room: Room) -> None:
    failure = FileFailure(operations=WRITES, last=EVER, errno=errno.ENOSPC)
    room.files.inject(failure)
    room.store(0, 16)
    wait_until(lambda: room.cache.stats().degraded, "the disk does not fail")
    wait_until(lambda: not room.dram().pinned_chunks, "chunks are staged for a disk that fails")
    assert room.dram().chunks == 16, "they are kept in DRAM and nothing else is"
    room.files.inject()
    room.written()
    assert room.cache.stats().tiers[1].chunks == 16


def test_b96_what_hangs_holds_what_is_being_written_alone(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.below.writeout.WRITE_DEADLINE_S", 0.05)
    gate = FileGate(operations=(FileOperation.CREATE,))
    room.files.inject(gate)
    room.store(0, 16)
    wait_until(lambda: room.dram().pinned_chunks <= 4, "chunks are staged for a disk that hangs")
    gate.open()
    room.written()


def test_write_back_stages_nothing(tmp_path: Path) -> None:
    room = Room(tmp_path, mode=WriteMode.BACK)
    room.store(0, 8)
    assert (room.dram().chunks, room.dram().pinned_chunks) == (8, 0)
    assert room.cache.stats().writes_queued == 8
    room.cache.close()


def test_a_disk_codec_that_cannot_pack_the_pool_leaks_nothing(tmp_path: Path) -> None:
    room = Room(tmp_path, codec="raw")
    sequence = room.cache.sequence(namespace("float8_e4m3fn"))
    sequence.append(range(CHUNK))
    with pytest.raises(CodecError, match="float8"):
        room.begin(sequence)
    assert (room.dram().pinned_chunks, room.dram().used_bytes) == (0, 0)
    room.cache.check_integrity()
    room.cache.close()
