"""What goes to a remote: its order, batches, limits, and what is given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvtier.cache.below import remotes as remotes_module
from kvtier.cache.below import upload as upload_module
from kvtier.config import RemoteConfig
from kvtier.constants import (
    REMOTE_ASKED_CHUNKS_MAX,
    REMOTE_CONNECTIONS_MAX,
    REMOTE_KNOWN_CHUNKS_MAX,
    REMOTE_LISTED_MAX,
    UPLOAD_CHUNKS_MAX,
    UPLOAD_JOBS_MAX,
    UPLOAD_TRIES_MAX,
    UPLOADS_WAITING_MAX,
)
from kvtier.errors import ConfigError, ConnectorUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.remote import tier as tier_module
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK, LAYOUT, refused, settle, tier_stats, written
from tests.lib.remote_lab import (
    RemoteLab,
    first_answer,
    remote_counters,
    remote_lab,
    tokens_of,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def store_many(engine: EngineDouble, count: int, start: int = 0) -> None:
    for number in range(count):
        engine.store(engine.sequence(tokens_of(1, start=start + 100 * number)))


def test_what_waits_goes_in_batches_and_few_jobs_are_out(lab: RemoteLab) -> None:
    engine = lab.open(dram_chunks=64)
    lab.remote.hold("contains")
    store_many(engine, UPLOAD_JOBS_MAX)
    lab.remote.wait_for_calls("contains", UPLOAD_JOBS_MAX)
    store_many(engine, 2 * UPLOAD_CHUNKS_MAX, start=50_000)
    assert lab.remote.calls["contains"] == UPLOAD_JOBS_MAX
    lab.remote.release()
    written(engine)
    asked = [count for operation, count in lab.remote.batches if operation == "contains"]
    assert asked[: UPLOAD_JOBS_MAX + 1] == [1] * UPLOAD_JOBS_MAX + [UPLOAD_CHUNKS_MAX]
    assert sum(asked) == UPLOAD_JOBS_MAX + 2 * UPLOAD_CHUNKS_MAX
    assert len(lab.remote.objects()) == sum(asked)


def test_what_waits_is_bounded(lab: RemoteLab) -> None:
    assert UPLOADS_WAITING_MAX >= UPLOAD_CHUNKS_MAX * UPLOAD_JOBS_MAX
    with mock.patch.object(upload_module, "UPLOADS_WAITING_MAX", 3):
        engine = lab.open(dram_chunks=64)
        lab.remote.hold("contains")
        store_many(engine, UPLOAD_JOBS_MAX)
        lab.remote.wait_for_calls("contains", UPLOAD_JOBS_MAX)
        store_many(engine, 5, start=50_000)
        assert refused(engine, Tier.REMOTE) == {MissReason.UNAVAILABLE: 2}
        lab.remote.release()
        written(engine)
    assert len(lab.remote.objects()) == UPLOAD_JOBS_MAX + 3


def test_parents_are_written_before_their_children(lab: RemoteLab) -> None:
    engine = lab.open(connections=1)
    sequence = engine.sequence(tokens_of(20))
    engine.store(sequence)
    written(engine)
    assert [key[:32] for key in lab.remote.written] == sequence.chunk_keys


def test_a_chunk_is_tried_so_often_and_no_more(lab: RemoteLab) -> None:
    """With each try all those that a call is given; between them, the breaker may be open."""
    clock = FakeClock()
    engine = lab.open(clock=clock)
    lab.remote.loses = True
    lab.remote.twist["write"] = lambda answer: [ConnectorUnavailableError("no") for _ in answer]
    store_many(engine, 1)

    def given_up() -> bool:
        clock.advance(0.5)
        return engine.cache.stats().writes_queued == 0

    wait_until(given_up, "tried for ever")
    assert remote_counters(engine).io_errors == UPLOAD_TRIES_MAX
    assert refused(engine, Tier.REMOTE) == {MissReason.IO_ERROR: 1}


def test_a_chunk_that_leaves_dram_while_it_is_written_is_written_whole(lab: RemoteLab) -> None:
    engine = lab.open(dram_chunks=2)
    sequence = engine.sequence(tokens_of(1))
    lab.remote.hold("write")
    engine.store(sequence)
    lab.remote.wait_for_calls("write", 1)
    assert engine.cache.remove(sequence.chunk_keys) == [False]
    store_many(engine, 3, start=1000)
    lab.remote.release()
    written(engine)
    settle(engine)
    lab.close(engine)
    engine = lab.open()
    assert engine.load(engine.match(engine.sequence(tokens_of(1)))).outcome.end_token == CHUNK


def test_a_remote_that_is_bounded_writes_nothing_before_it_knows_what_is_there(
    lab: RemoteLab,
) -> None:
    clock = FakeClock()
    lab.remote.twist["list"] = lambda _: (_ for _ in ()).throw(KeyError("a bug"))
    engine = lab.open(capacity_bytes=64 * 16384, clock=clock)
    store_many(engine, 3)
    wait_until(lambda: lab.remote.calls["list"] > 0, "nobody lists")
    assert lab.remote.objects() == {}
    lab.remote.twist.clear()

    def listed() -> bool:
        clock.advance(1.0)
        return not engine.cache.stats().degraded

    wait_until(listed, "it is not listed")
    written(engine)
    assert len(lab.remote.objects()) == 3


def test_a_listing_beyond_its_bound_is_told_and_nothing_is_written(lab: RemoteLab) -> None:
    for number in range(4):
        lab.remote.put(b"%d" % number, b"data")
    assert REMOTE_LISTED_MAX > 1_000_000
    with mock.patch.object(remotes_module, "REMOTE_LISTED_MAX", 3):
        engine = lab.open(capacity_bytes=64 * 16384)
        wait_until(lambda: tier_stats(engine.cache, Tier.REMOTE).state == "full", "not told")
        store_many(engine, 1)
        settle(engine)
    assert lab.remote.calls["list"] == 1
    assert len(lab.remote.objects()) == 4


def test_questions_under_way_are_bounded(lab: RemoteLab) -> None:
    """What is not asked for is not waited for."""
    assert REMOTE_ASKED_CHUNKS_MAX >= 1024
    with mock.patch.object(remotes_module, "REMOTE_ASKED_CHUNKS_MAX", 4):
        engine = lab.open()
        lab.remote.hold("contains")
        first_answer(engine, tokens_of(3))
        first_answer(engine, tokens_of(3, start=500))
        engine.cache.check_integrity()
        assert engine.match(engine.sequence(tokens_of(3, start=900))).tokens == 0
        lab.remote.wait_for_calls("contains", 2)
        assert lab.remote.count("contains") == 4
        lab.remote.release()


def test_what_is_remembered_of_a_remote_is_bounded(lab: RemoteLab) -> None:
    assert REMOTE_KNOWN_CHUNKS_MAX > 100_000
    with mock.patch.object(tier_module, "REMOTE_KNOWN_CHUNKS_MAX", 2):
        engine = lab.open()
    store_many(engine, 3)
    written(engine)
    lab.remote.batches.clear()
    engine.match(engine.sequence(tokens_of(1)))
    engine.store(engine.sequence(tokens_of(1)))
    assert tier_stats(engine.cache, Tier.REMOTE).chunks == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "redis"),
        ("capacity_bytes", -1),
        ("capacity_bytes", 1.5),
        ("connections", 0),
        ("connections", REMOTE_CONNECTIONS_MAX + 1),
        ("ttl_s", 0.0),
        ("absent_s", float("nan")),
        ("deadline_s", float("inf")),
        ("policy", ""),
        ("admission", ""),
        ("write_bytes_per_day", -1),
    ],
)
def test_settings_that_cannot_be_are_refused_without_the_url(field: str, value: object) -> None:
    given = {"url": "redis://user:secret@host", field: value}
    with pytest.raises(ConfigError, match=field) as caught:
        RemoteConfig(**given)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_fair_shares_a_short_load_ends_while_a_long_one_goes_on(lab: RemoteLab) -> None:
    """Each load has a few chunks on their way, so nobody waits for the whole of another."""
    long, short = tokens_of(40), tokens_of(2, start=5000)
    engine = lab.open(LAYOUT, dram_chunks=64)
    engine.store(engine.sequence(long))
    engine.store(engine.sequence(short))
    written(engine)
    lab.close(engine)
    engine = lab.open(connections=1)
    first = engine.begin_load(engine.match(engine.sequence(long)))
    second = engine.begin_load(engine.match(engine.sequence(short)))
    assert first is not None
    assert second is not None

    def both() -> bool:
        engine.step(first)
        return engine.step(second)

    wait_until(both, "the short one starves")
    assert first.load.outcome is None
    engine.drive(first)
    assert (first.outcome.end_token, second.outcome.end_token) == (len(long), len(short) + 0)
