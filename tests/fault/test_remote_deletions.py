"""What is to be deleted in a remote is: nothing is dropped on the way, or said to be gone early."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.cache.below import deletions
from kvtier.constants import REMOTE_TRIES_MAX
from kvtier.errors import ConnectorUnavailableError
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.remote import channel
from kvtier.types import ChunkKey, Tier
from tests.lib.cache_setup import CHUNK_BYTES, settle, tier_stats, written
from tests.lib.remote_lab import (
    RemoteLab,
    ToyRemote,
    remote_counters,
    remote_lab,
    tokens_of,
)

CHUNKS = 12


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def stored(engine: EngineDouble, count: int = CHUNKS) -> tuple[ChunkKey, ...]:
    """Store chunks that have no parents; return their keys."""
    keys = []
    for number in range(count):
        sequence = engine.sequence(tokens_of(1, start=1000 * number))
        assert engine.store(sequence)
        keys += sequence.chunk_keys
        written(engine)
        settle(engine)  # What is being written holds its slot.
    return tuple(keys)


def in_remote(lab: RemoteLab, count: int) -> None:
    wait_until(lambda: len(lab.remote.objects()) == count, f"{len(lab.remote.objects())} are there")


def test_more_deletions_than_may_wait_in_a_channel_all_happen(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lab.open()
    keys = stored(engine)
    monkeypatch.setattr(channel, "REMOTE_JOBS_MAX", 4)
    lab.remote.hold("delete")
    assert engine.cache.remove(keys) == [True] * CHUNKS
    assert engine.cache.stats().deletions_queued == CHUNKS
    lab.remote.release()
    in_remote(lab, 0)
    wait_until(lambda: not engine.cache.stats().deletions_queued, "something is still to go")


def test_what_a_remote_did_not_delete_is_deleted_when_it_is_back(lab: RemoteLab) -> None:
    engine = lab.open(salt="ours", dram_chunks=2)
    stored(engine)

    def fail(_: object) -> None:
        raise ConnectorUnavailableError("away")

    lab.remote.twist = dict.fromkeys(("contains", "read", "delete"), fail)
    lab.remote.hold("delete")
    engine.cache.tenants.delete("ours")
    lab.remote.wait_for_calls("delete", 1)
    tenants = engine.cache.tenants
    wait_until(lambda: not tenants.nbytes("ours"), "not all is to go")
    assert tenants.reclaimable_bytes == CHUNKS * CHUNK_BYTES, "nothing is said to be gone"
    lab.remote.release()
    wait_until(lambda: engine.cache.stats().degraded, "it is not known to be away")
    engine.cache.check_integrity()
    assert tenants.reclaimable_bytes == CHUNKS * CHUNK_BYTES
    lab.remote.twist = {}
    wait_until(lambda: not tenants.reclaimable_bytes, "it is not deleted")
    in_remote(lab, 0)


def test_when_too_much_is_to_be_deleted_the_rest_stays_and_counts(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "DELETIONS_WAITING_MAX", 5)
    monkeypatch.setattr(deletions, "DELETION_CHUNKS_MAX", 2)
    engine = lab.open(salt="ours")
    keys = stored(engine)
    lab.remote.hold("delete")
    assert engine.cache.remove(keys) == [True] * 5 + [False] * 7, "a refusal is said"
    assert engine.cache.tenants.nbytes("ours") == 2 * 7 * CHUNK_BYTES
    engine.cache.check_integrity()
    lab.remote.release()
    in_remote(lab, 7)
    wait_until(lambda: not engine.cache.stats().deletions_queued, "something is still to go")
    assert engine.cache.remove(keys[5:10]) == [True] * 5
    engine.cache.tenants.delete("ours")
    in_remote(lab, 0)
    wait_until(lambda: not engine.cache.tenants.reclaimable_bytes, "something counts still")


def test_what_is_stored_again_before_it_was_deleted_stays(
    lab: RemoteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "DELETION_CHUNKS_MAX", 1)
    engine = lab.open()
    keys = stored(engine, 3)
    lab.remote.hold("delete")
    assert engine.cache.remove(keys) == [True] * 3
    stored(engine, 3)
    lab.remote.release()
    wait_until(lambda: lab.remote.calls["delete"] == 1, "not even the first is deleted")
    settle(engine)
    assert lab.remote.calls["delete"] == 1, "the others are to be there"
    assert {key[: len(keys[0])] for key in lab.remote.objects()} >= set(keys[1:])


class Stubborn(ToyRemote):
    """Deletes nothing at first, and says so."""

    failures = REMOTE_TRIES_MAX

    async def delete(self, keys: Sequence[bytes]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectorUnavailableError("away")
        await super().delete(keys)


def test_what_gave_way_to_a_write_goes_though_it_could_not_at_first(tmp_path: Path) -> None:
    with remote_lab(tmp_path) as lab:
        lab.remotes = [Stubborn()]
        engine = lab.open(capacity_bytes=2 * CHUNK_BYTES)
        wait_until(lambda: not engine.cache.stats().degraded, "it is not listed")
        stored(engine, 3)
        assert lab.remote.failures == 0  # type: ignore[attr-defined]
        assert remote_counters(engine).io_errors == 1
        in_remote(lab, 2)
        assert tier_stats(engine.cache, Tier.REMOTE).used_bytes == 2 * CHUNK_BYTES


def test_what_is_left_at_the_end_is_told(lab: RemoteLab, caplog: pytest.LogCaptureFixture) -> None:
    engine = lab.open()
    keys = stored(engine, 3)
    lab.remote.hold("delete")
    engine.cache.remove(keys)
    with caplog.at_level(logging.WARNING, "kvtier.remote"):
        engine.cache.close(timeout_s=0.2)
    assert "3 chunks stay in remotes that were to be deleted there" in caplog.text
    lab.remote.release()
