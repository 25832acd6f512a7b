"""A remote that fails, lies, comes back: requests go on and tokens are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache.match import Ready
from kvtier.constants import BREAKER_FAILURES_MAX, HEALTH_BACKOFF_S_MAX
from kvtier.errors import (
    ConnectorDataError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.shard_format import ShardDescription, parse_header, seal
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.testing.faults import CutRead, DropKey, FailCall, Fault, Faulty, FlipBit, Operation
from kvtier.types import Fidelity, KVLayout, Miss, MissReason, Tier
from tests.lib.cache_setup import CHUNK, FULL, SPLIT, ranks, refused, settle, tier_stats, written
from tests.lib.remote_lab import (
    RemoteLab,
    ToyRemote,
    chunk_of,
    remote_counters,
    remote_lab,
    tokens_of,
)

FIVE = tokens_of(5)
AWAY = ConnectorUnavailableError("away")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def state(engine: EngineDouble) -> str:
    return tier_stats(engine.cache, Tier.REMOTE).state


def begun_again(engine: EngineDouble, match: Ready) -> Loading:
    loading = engine.begin_load(match)
    assert loading is not None
    return loading


def failing(answer: list[Any]) -> list[Any]:
    return [AWAY for _ in answer]


def spoil_chunk(lab: RemoteLab, engine: EngineDouble, chunk: int, change: Any) -> bytes:
    """Change the object of one chunk; return its key."""
    key = engine.sequence(FIVE).chunk_keys[chunk]
    (name,) = chunk_of(key, lab.remote.objects())
    lab.remote.put(name, change(lab.remote.objects()[name]))
    return name


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        spoiled = bytearray(data)
        spoiled[at] ^= 16
        return bytes(spoiled)

    return change


# Lies


@pytest.mark.parametrize(
    "change",
    [
        flip(100),
        flip(4096 + 17),
        flip(3 * 4096 + 1),
        lambda data: data[:-4096],
        lambda data: data[:100],
        lambda _: b"",
        lambda _: b"\x80\x04." * 6000,
    ],
    ids=["header", "first section", "last section", "short", "no header", "empty", "pickle"],
)
def test_b78_what_was_changed_is_a_miss_and_is_written_anew(
    lab: RemoteLab, change: Callable[[bytes], bytes]
) -> None:
    clock = FakeClock()
    engine = lab.filled(FIVE, clock=clock)
    name = spoil_chunk(lab, engine, 2, change)
    loading = engine.load(engine.match(engine.sequence(FIVE)))
    assert loading.outcome.end_token == 2 * CHUNK
    assert loading.outcome.misses == (Miss(Tier.REMOTE, MissReason.CORRUPT, 3 * CHUNK),)
    assert remote_counters(engine).corrupt_shards == 1
    wait_until(lambda: name not in lab.remote.objects(), "it is left there")
    assert state(engine) == "ok"
    engine.store(engine.sequence(FIVE))
    written(engine)
    clock.advance(3.0)
    lab.close(engine)
    engine = lab.open()
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)


def test_b78_another_keys_bytes_are_a_miss(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    others = lab.remote.objects()
    keys = engine.sequence(FIVE).chunk_keys
    (first,), (second,) = chunk_of(keys[1], others), chunk_of(keys[2], others)
    lab.remote.put(first, others[second])
    lab.remote.put(second, others[first])
    loading = engine.load(engine.match(engine.sequence(FIVE)))
    assert loading.outcome.end_token == CHUNK
    assert loading.outcome.misses[0].reason is MissReason.CORRUPT


def test_b45_one_rank_s_shard_that_is_wrong_shortens_the_load_of_both(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, layout=SPLIT, placements=ranks(2))
    key = engine.sequence(FIVE).chunk_keys[3]
    _, second = chunk_of(key, lab.remote.objects())
    lab.remote.put(second, flip(5000)(lab.remote.objects()[second]))
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 3 * CHUNK


@pytest.mark.parametrize(
    "lie",
    [
        lambda answer: answer[:-1],
        lambda answer: [*answer, 16384],
        lambda _: None,
        lambda answer: [math.nan for _ in answer],
        lambda answer: [-1 for _ in answer],
        lambda answer: [count and count + 1 for count in answer],
        lambda answer: [True for _ in answer],
        lambda answer: [ConnectorDataError("odd") for _ in answer],
    ],
    ids=["half a batch", "too many", "nothing", "nan", "negative", "more", "bool", "data error"],
)
def test_b74_an_answer_that_cannot_be_is_a_miss(
    lab: RemoteLab, lie: Callable[[list[Any]], Any]
) -> None:
    engine = lab.filled(FIVE)
    lab.remote.twist["read"] = lie
    loading = engine.load(engine.match(engine.sequence(FIVE)))
    assert loading.outcome.end_token == 0
    assert loading.outcome.misses == (Miss(Tier.REMOTE, MissReason.CORRUPT, len(FIVE)),)
    assert len(lab.remote.objects()) == 5, "nothing says that what lies there is wrong"


@pytest.mark.parametrize("lie", [lambda answer: answer[:-1], lambda _: 7, lambda _: None])
def test_a_lookup_that_is_answered_wrongly_finds_nothing(
    lab: RemoteLab, lie: Callable[[list[Any]], Any]
) -> None:
    clock = FakeClock()
    engine = lab.filled(FIVE, clock=clock, pending_deadline_s=1.0)
    lab.remote.twist["contains"] = lie
    sequence = engine.sequence(FIVE)

    def given_up() -> bool:
        engine.cache.match(sequence)
        return state(engine) != "ok"

    wait_until(given_up, "never given up")
    assert engine.match(sequence).tokens == 0


def test_a_codec_that_no_such_layout_has_is_a_miss(lab: RemoteLab) -> None:
    """A sound header may name it all the same: who writes to a remote writes what he likes."""
    group = replace(FULL, dtype="float8_e4m3fn")
    layout = KVLayout((group,), chunk_tokens=CHUNK, section_layers=1)

    def opened() -> EngineDouble:
        engine = lab.open(layout)
        engine.namespace = replace(engine.namespace, fidelity=Fidelity.LOSSY)
        return engine

    engine = opened()
    sequences = [engine.sequence(tokens_of(2, start)) for start in (0, 1000)]
    for sequence in sequences:
        engine.store(sequence)
    written(engine)
    lab.close(engine)
    (forged,) = chunk_of(sequences[0].chunk_keys[1], lab.remote.objects())
    data = bytearray(lab.remote.objects()[forged])
    header = parse_header(memoryview(data))
    known = {each.name: getattr(header, each.name) for each in fields(ShardDescription)}
    seal(memoryview(data), ShardDescription(**{**known, "codec": "int8"}))
    lab.remote.put(forged, bytes(data))
    engine = opened()
    for _ in range(2):
        for start, tokens in ((0, CHUNK), (1000, 2 * CHUNK)):
            match = engine.match(engine.sequence(tokens_of(2, start)))
            engine.cache.costs.choose(match, 0, match.tokens)
            assert engine.load(match).outcome.end_token == tokens
            engine.cache.holdings.evict([hit.key for hit in reversed(match.hits)], [Tier.DRAM])


def test_a_remote_that_says_yes_to_all_gives_what_it_has(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.twist["contains"] = lambda answer: [True for _ in answer]
    tokens = tokens_of(8)
    match = engine.match(engine.sequence(tokens))
    assert match.tokens == len(tokens)
    outcome = engine.load(match).outcome
    assert outcome.end_token == len(FIVE)
    assert outcome.misses == (Miss(Tier.REMOTE, MissReason.ABSENT, 3 * CHUNK),)
    assert engine.match(engine.sequence(tokens)).tokens == len(FIVE)


def test_b45_what_the_store_evicts_is_a_miss_for_every_rank(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, layout=SPLIT, placements=ranks(2))
    match = engine.match(engine.sequence(FIVE))
    _, second = chunk_of(match.hits[1].key, lab.remote.objects())
    lab.remote.drop(second)
    assert engine.load(match).outcome.end_token == CHUNK
    assert state(engine) == "ok"


@pytest.mark.parametrize("kind", ["flip", "cut", "drop"])
def test_faults_of_the_kit_are_misses(lab: RemoteLab, kind: str) -> None:
    wrapped: list[Faulty] = []

    def wrap(inner: Any) -> Faulty:
        wrapped.append(Faulty(inner))
        return wrapped[-1]

    lab.wrap = wrap
    engine = lab.filled(FIVE)
    (name,) = chunk_of(engine.sequence(FIVE).chunk_keys[1], lab.remote.objects())
    match = engine.match(engine.sequence(FIVE))
    kinds: dict[str, Fault] = {
        "flip": FlipBit(name),
        "cut": CutRead(name, 900),
        "drop": DropKey(name),
    }
    wrapped[-1].faults = [kinds[kind]]
    outcome = engine.load(match).outcome
    assert outcome.end_token == CHUNK
    reason = MissReason.ABSENT if kind == "drop" else MissReason.CORRUPT
    assert outcome.misses == (Miss(Tier.REMOTE, reason, 4 * CHUNK),)


# Failing and coming back


def test_a_read_that_fails_once_is_tried_again(lab: RemoteLab) -> None:
    def wrap(inner: Any) -> Faulty:
        return Faulty(inner, [FailCall(Operation.READ, 3)])  # After both copies of the epochs.

    lab.wrap = wrap
    engine = lab.filled(FIVE)
    outcome = engine.load(engine.match(engine.sequence(FIVE))).outcome
    assert (outcome.end_token, outcome.misses) == (len(FIVE), ())
    assert state(engine) == "ok"


def raises(_: Any) -> Any:
    raise KeyError("a bug of the connector")


@pytest.mark.parametrize("fault", [failing, raises])
def test_b119_it_opens_goes_without_and_closes_again(
    lab: RemoteLab, fault: Callable[[Any], Any]
) -> None:
    clock = FakeClock()
    engine = lab.filled(FIVE, clock=clock, load_deadline_s=60.0)
    lab.remote.twist["read"] = fault
    match = engine.match(engine.sequence(FIVE))
    for _ in range(BREAKER_FAILURES_MAX):
        assert engine.drive(begun_again(engine, match)).end_token == 0
    assert state(engine) == "failing"
    assert "breaker" in tier_stats(engine.cache, Tier.REMOTE).detail
    asked = lab.remote.calls["contains"]
    assert engine.match(engine.sequence(FIVE)).tokens == 0, "nobody waits for it"
    assert lab.remote.calls["contains"] == asked
    settle(engine)
    loading = begun_again(engine, match)
    assert engine.drive(loading).misses == (Miss(Tier.REMOTE, MissReason.UNAVAILABLE, len(FIVE)),)
    lab.remote.twist.clear()

    def back() -> bool:
        clock.advance(HEALTH_BACKOFF_S_MAX)
        return state(engine) == "ok"

    wait_until(back, "it stays open")
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)


def test_b119_a_remote_that_is_away_at_the_start_is_used_when_it_comes(lab: RemoteLab) -> None:
    clock = FakeClock()
    lab.remote.loses = True
    lab.remote.twist["write"] = lab.remote.twist["read"] = failing
    engine = lab.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    wait_until(lambda: state(engine) == "failing", "nobody notices")
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    lab.remote.twist.clear()
    lab.remote.loses = False

    def back() -> bool:
        clock.advance(HEALTH_BACKOFF_S_MAX)
        return not engine.cache.stats().degraded

    wait_until(back, "it stays open")
    engine.cache.note_admission(engine.match(engine.sequence(FIVE)), 0, len(FIVE))
    wait_until(lambda: len(lab.remote.objects()) == 5, "nothing is written")


def test_b110_a_store_that_is_full_is_asked_once_for_each_chunk(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.calls.clear()
    lab.remote.batches.clear()
    lab.remote.loses = True
    lab.remote.twist["write"] = lambda answer: [ConnectorRefusedError("OOM") for _ in answer]
    for number in range(10):
        engine.store(engine.sequence(tokens_of(1, start=1000 + 100 * number)))
    written(engine)
    assert lab.remote.count("write") == 10
    assert refused(engine, Tier.REMOTE)[MissReason.NO_ROOM] == 10
    assert remote_counters(engine).io_errors == 10
    assert state(engine) == "full"
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
    lab.remote.twist.clear()
    lab.remote.loses = False
    engine.store(engine.sequence(tokens_of(1, start=9000)))
    written(engine)
    assert state(engine) == "ok"


@pytest.mark.parametrize("error", [ConnectorUnavailableError, ConnectorTimeoutError])
def test_a_write_that_fails_is_tried_again_and_not_for_ever(
    lab: RemoteLab, error: Callable[[str], Exception]
) -> None:
    clock = FakeClock()
    engine = lab.open(clock=clock)
    lab.remote.loses = True
    lab.remote.twist["write"] = lambda answer: [error("away") for _ in answer]
    engine.store(engine.sequence(tokens_of(1)))

    def given_up() -> bool:
        clock.advance(HEALTH_BACKOFF_S_MAX)
        return engine.cache.stats().writes_queued == 0

    wait_until(given_up, "tried for ever")
    assert refused(engine, Tier.REMOTE) == {MissReason.IO_ERROR: 1}


def test_a_second_remote_serves_while_the_first_is_away(lab: RemoteLab) -> None:
    lab.remotes.append(ToyRemote())
    engine = lab.filled(FIVE)
    lab.remotes[0].twist["read"] = failing
    match = engine.match(engine.sequence(FIVE))
    while state(engine) == "ok":
        loading = engine.begin_load(match)
        assert loading is not None
        engine.drive(loading)
    outcome = engine.load(engine.match(engine.sequence(FIVE))).outcome
    assert outcome.tokens_by_tier == {Tier.REMOTE: len(FIVE)}
