"""What a tenant holds in remotes: counted as far as this cache wrote it, bounded, given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.constants import REMOTE_TRIES_MAX
from kvtier.errors import ConnectorUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.remote.written import Written
from kvtier.types import ChunkKey, MissReason, ShardId, Tier
from tests.lib.cache_setup import CHUNK_BYTES, of_tenant, refused, settle, tier_stats, written
from tests.lib.remote_lab import (
    RemoteLab,
    ToyRemote,
    first_answer,
    remote_counters,
    remote_lab,
    tokens_of,
)

ONE = frozenset({ShardId(0, 0, 0)})


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def stored(engine: EngineDouble, tokens: range) -> None:
    engine.store(engine.sequence(tokens))
    written(engine)
    settle(engine)


def chunks(engine: EngineDouble, salt: str = "ours") -> float:
    return engine.cache.tenants.nbytes(salt) / CHUNK_BYTES


def in_remote(lab: RemoteLab, count: float) -> None:
    """Deletions are not waited for by anybody."""
    wait_until(lambda: len(lab.remote.objects()) == count, f"{len(lab.remote.objects())} are there")


def test_bytes_in_remotes_count_in_each_of_them(lab: RemoteLab) -> None:
    lab.remotes.append(ToyRemote())
    engine = lab.open(salt="ours", disk_chunks=16)
    stored(engine, tokens_of(3))
    wait_until(lambda: tier_stats(engine.cache, Tier.DISK).chunks == 3, "not on disk")
    assert chunks(engine) == 4 * 3
    assert chunks(engine, "theirs") == 0


def test_encoded_bytes_count_as_they_lie_there(lab: RemoteLab) -> None:
    engine = lab.open(salt="ours", byte_codec="zstd")
    stored(engine, tokens_of(3))
    there = sum(map(len, lab.remote.objects().values()))
    assert engine.cache.tenants.nbytes("ours") == 3 * CHUNK_BYTES + there


def test_what_others_wrote_is_theirs_to_count(lab: RemoteLab) -> None:
    """Each byte counts once, whoever shares the remote: with the one that wrote it."""
    first = lab.open(salt="ours")
    stored(first, tokens_of(3))
    second = lab.open(salt="ours")
    second.load(second.match(second.sequence(tokens_of(3))))
    stored(second, tokens_of(3))
    assert (chunks(first), chunks(second)) == (6, 3)


def test_a_job_of_which_nothing_may_be_written_agrees_with_the_books(lab: RemoteLab) -> None:
    """It still deletes what gives way, which takes as long as the remote does."""
    engine = lab.open(salt="ours", quota_chunks=8, capacity_bytes=64 * CHUNK_BYTES)
    wait_until(lambda: not engine.cache.stats().degraded, "it is not listed")
    stored(engine, tokens_of(1))
    lab.remote.hold("contains", "delete")
    engine.store(engine.sequence(tokens_of(1, 1000)))
    engine.cache.remove(engine.sequence(tokens_of(1)).chunk_keys)
    engine.cache.tenants.limit(1, {})
    deletions = lab.remote.calls["delete"]
    lab.remote.release("contains")
    lab.remote.wait_for_calls("delete", deletions + 1)
    wait_until(lambda: bool(refused(engine, Tier.REMOTE)), "nothing is refused")
    engine.cache.check_integrity()


@pytest.mark.parametrize("disk_chunks", [None, 64])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_tenant_above_its_quota_gives_way_to_itself_alone(
    lab: RemoteLab, disk_chunks: int | None, *, bounded: bool
) -> None:
    capacity_bytes = 64 * CHUNK_BYTES if bounded else 0
    ours = lab.open(
        salt="ours", quota_chunks=8, disk_chunks=disk_chunks, capacity_bytes=capacity_bytes
    )
    wait_until(lambda: not ours.cache.stats().degraded, "it is not listed")
    with closing(of_tenant(ours, "theirs")) as theirs:
        stored(theirs, tokens_of(2))
        before = chunks(ours, "theirs")
        for start in range(1000, 9000, 1000):
            stored(ours, tokens_of(2, start=start))
            assert chunks(ours) <= 8
        assert chunks(ours, "theirs") == before
        match = ours.match(ours.sequence(tokens_of(2, start=8000)))
        assert match.tokens == len(tokens_of(2)), "the latest stays"
    if not bounded:
        in_remote(lab, counted_chunks(ours))


def counted_chunks(engine: EngineDouble) -> float:
    """Chunks in the remote as they are counted, of both tenants."""
    near = sum(tier.chunks for tier in engine.cache.stats().tiers if tier.tier is not Tier.REMOTE)
    return chunks(engine) + chunks(engine, "theirs") - near


def test_what_does_not_fit_is_not_written_and_counted(lab: RemoteLab) -> None:
    """A sequence of its own that fills the quota: nothing of it gives way to the rest of it."""
    engine = lab.open(salt="ours", quota_chunks=4)
    stored(engine, tokens_of(3))
    assert refused(engine, Tier.REMOTE) == {MissReason.QUOTA: 2}
    assert chunks(engine) == 4
    in_remote(lab, 1)


def test_a_deleted_tenants_chunks_leave_the_remote_that_has_them_alone(lab: RemoteLab) -> None:
    engine = lab.open(salt="ours", dram_chunks=2)
    for start in range(0, 4000, 1000):
        stored(engine, tokens_of(1, start=start))
    assert chunks(engine) == 4 + 2
    in_remote(lab, 4)
    engine.cache.tenants.delete("ours")
    wait_until(lambda: not chunks(engine), "not all is given back")
    wait_until(lambda: not engine.cache.tenants.reclaimable_bytes, "something is still to go")
    in_remote(lab, 0)


def test_what_the_store_has_lost_counts_no_more(lab: RemoteLab) -> None:
    engine = lab.open(salt="ours", dram_chunks=1, ttl_s=60.0)
    stored(engine, tokens_of(1))
    stored(engine, tokens_of(1, start=1000))
    assert chunks(engine) == 3
    for key in list(lab.remote.objects()):
        lab.remote.drop(key)
    engine.load(engine.match(engine.sequence(tokens_of(1))))
    assert chunks(engine) <= 2


def test_what_could_not_be_asked_for_again_counts_as_it_lies_there(lab: RemoteLab) -> None:
    """What was known of it is too old, and the remote is away when it is looked for."""
    clock = FakeClock()
    engine = lab.open(salt="ours", clock=clock, ttl_s=1.0)
    stored(engine, tokens_of(1))
    clock.advance(2.0)
    failures = iter([True] * REMOTE_TRIES_MAX)

    def away(answer: list[bool]) -> list[bool]:
        if next(failures, False):
            raise ConnectorUnavailableError("away")
        return answer

    lab.remote.twist["contains"] = away
    engine.load(engine.match(engine.sequence(tokens_of(1))))
    written(engine)
    assert remote_counters(engine).io_errors == 1
    assert chunks(engine) == 2


class LateAnswer(ToyRemote):
    """Looks for what it is asked at once, and tells the first time only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_tell, self.told = threading.Event(), threading.Event()

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        first = not self.calls["contains"]
        found = await super().contains(keys)
        if first:
            await asyncio.to_thread(self.may_tell.wait, 20)
            self.told.set()
        return found


def test_what_was_written_since_it_was_asked_for_is_there_and_counts(lab: RemoteLab) -> None:
    late = LateAnswer()
    lab.remotes[:] = [late]
    engine = lab.open(salt="ours", dram_chunks=1)
    first_answer(engine, tokens_of(1))
    lab.remote.wait_for_calls("contains", 1)
    stored(engine, tokens_of(1))
    assert chunks(engine) == 2
    late.may_tell.set()
    assert late.told.wait(20)
    # Answers come in the order in which they are given.
    assert not engine.match(engine.sequence(tokens_of(1, start=1000))).tokens
    assert chunks(engine) == 2


def test_what_nobody_owns_is_not_counted(lab: RemoteLab) -> None:
    engine = lab.open(quota_chunks=1)
    stored(engine, tokens_of(4))
    in_remote(lab, 4)
    assert refused(engine, Tier.REMOTE) == {}


# The books


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def test_the_oldest_count_no_more_beyond_a_bound() -> None:
    books = Written(3)
    for number in range(5):
        books.note(key_of(number), b"root", 10, ONE)
    books.check_integrity()
    assert len(books) == 3
    assert books.bytes_of(b"root") == 30
    assert [key for _, key in sorted(books.keys_of([b"root"]))] == [key_of(n) for n in (2, 3, 4)]


def test_what_is_written_again_counts_once_as_it_is_now() -> None:
    books = Written(3)
    books.note(key_of(1), b"old", 10, ONE)
    books.note(key_of(1), b"new", 7, ONE)
    assert (books.bytes_of(b"old"), books.bytes_of(b"new")) == (0, 7)
    assert (books.drop(key_of(1)), books.drop(key_of(1))) == (7, 0)
    assert books.get(key_of(1)) is None
    books.check_integrity()
