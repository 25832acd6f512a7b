"""A cache that measures what loads cost, and leaves or gives up those that are not worth it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.worth.cost import Reason
from kvtier.cache.worth.costs import Choice
from kvtier.cache.worth.patience import IN_VAIN, Progress
from kvtier.constants import COST_SAVE_S
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK, CHUNK_BYTES, CacheSetup, cache_setup, settle, tier_stats
from tests.lib.remote_lab import remote_lab

TOKENS = range(4 * CHUNK)
COSTS = "costs.json"


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as made:
        yield made


def chosen(engine: EngineDouble) -> tuple[Ready, Choice]:
    match = engine.match(engine.sequence(TOKENS))
    return match, engine.cache.costs.choose(match, 0, match.tokens)


def reasons(choice: Choice) -> list[Reason]:
    return [each.reason for each in choice.judged]


def begin(engine: EngineDouble, match: Ready, choice: Choice) -> Loading:
    blocks = engine.blocks(range(choice.end_token))
    engine.poison()
    load = engine.cache.begin_load(match, blocks, choice=choice)
    assert isinstance(load, Load)
    return Loading(load, match, blocks)


def test_nothing_is_known_at_first_so_a_load_shows_it(setup: CacheSetup) -> None:
    engine = setup.on_disk(TOKENS)
    match, choice = chosen(engine)
    assert reasons(choice) == [Reason.UNKNOWN]
    assert choice.end_token == len(TOKENS)
    engine.drive(begin(engine, match, choice))
    # The last section is there before the transfer that brought it has ended.
    settle(engine)
    stats = engine.cache.stats().costs
    assert stats.links[Tier.DISK].bytes_per_s > 0
    assert stats.moves_bytes_per_s["raw"] > 0


def test_what_is_dearer_to_compute_is_loaded(setup: CacheSetup) -> None:
    engine = setup.on_disk(TOKENS)
    engine.cache.costs.note_prefill(0, 100, 1000.0)
    match, choice = chosen(engine)
    engine.drive(begin(engine, match, choice))
    settle(engine)
    saved = engine.cache.stats().saved_compute_s
    assert saved == pytest.approx(10.0 * len(TOKENS), rel=0.2)
    assert engine.cache.stats().lost_compute_s == 0
    _, again = chosen(engine)
    assert reasons(again) == [Reason.FASTER]
    assert again.terms is None, "it lies in DRAM now"


def test_what_is_left_is_a_miss_with_its_reason(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock)
    costs = engine.cache.costs
    costs.note_prefill(0, 100, 0.1)
    link = costs.link(Tier.DISK)
    link.started(clock.now(), 1000)
    clock.advance(100.0)
    match, choice = chosen(engine)
    assert reasons(choice) == [Reason.SILENT]
    assert choice.end_token == 0
    engine.cache.note_admission(match, 0, len(TOKENS), choice)
    missed = tier_stats(engine.cache, Tier.DISK).counters.miss_tokens
    assert missed == {MissReason.COST: len(TOKENS)}
    assert engine.cache.stats().costs.decisions == {(Tier.DISK, "silent"): 1}
    link.arrived(clock.now(), 1000)
    link.ended(clock.now(), 1000)
    assert reasons(chosen(engine)[1]) == [Reason.RETRY], "it took 100 seconds for 1000 bytes"


def test_a_lookup_is_waited_for_as_long_as_computing_takes(tmp_path: Path) -> None:
    clock = FakeClock()
    with remote_lab(tmp_path) as lab:
        engine = lab.filled(TOKENS, clock=clock, pending_deadline_s=60.0, deadline_s=600.0)
        costs = engine.cache.costs
        costs.note_prefill(0, len(TOKENS), 10.0)
        lab.remote.hold("contains")
        sequence = engine.sequence(TOKENS)
        pending = engine.cache.match(sequence)
        assert pending == Pending(clock.now() + 60.0, 0)
        clock.advance(30.0)  # In the line, where nothing is lost.
        costs.bound_lookup(sequence, 0)
        clock.advance(10.0 * IN_VAIN - 0.1)
        assert isinstance(engine.cache.match(sequence), Pending)
        costs.bound_lookup(sequence, 0)
        clock.advance(0.2)
        assert isinstance(engine.cache.match(sequence), Ready), "it is computed"
        lab.remote.release()


def test_what_a_lookup_took_is_not_had_for_the_load(tmp_path: Path) -> None:
    clock = FakeClock()
    with remote_lab(tmp_path) as lab:
        engine = lab.filled(TOKENS, clock=clock, pending_deadline_s=60.0, deadline_s=600.0)
        costs = engine.cache.costs
        costs.note_prefill(0, len(TOKENS), 10.0)
        lab.remote.hold("contains")
        sequence = engine.sequence(TOKENS)
        assert isinstance(engine.cache.match(sequence), Pending)
        costs.bound_lookup(sequence, 0)
        clock.advance(4.0)
        lab.remote.release()
        match = engine.match(sequence)
        choice = costs.choose(match, 0, match.tokens)
        assert choice.terms is not None
        assert choice.terms.free_s == -4.0
        patience = costs.patience(choice)
        assert patience is not None
        clock.advance(10.0 * IN_VAIN - 4.0 - 0.1)
        assert not patience.over(clock.now(), Progress(0.0, 0.0, 0))
        clock.advance(0.2)
        assert patience.over(clock.now(), Progress(0.0, 0.0, 0))
        again = costs.choose(match, 0, match.tokens)
        assert again.terms is not None
        assert again.terms.free_s == 0.0, "it waits for something else now"


def test_a_load_that_does_not_come_is_given_up_when_computing_would_be_done(
    setup: CacheSetup,
) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock, load_deadline_s=60.0)
    engine.cache.costs.note_prefill(0, 100, 10.0)
    gate = FileGate(operations=(FileOperation.READ,))
    setup.files.inject(gate)
    match, choice = chosen(engine)
    loading = begin(engine, match, choice)
    assert not engine.step(loading)
    gate.wait_for_arrivals()
    clock.advance(len(TOKENS) * 0.1 * IN_VAIN - 0.01)
    assert not engine.step(loading)
    clock.advance(0.02)
    assert engine.step(loading)
    assert loading.outcome.end_token == 0
    (miss,) = loading.outcome.misses
    assert (miss.tier, miss.reason, miss.tokens) == (Tier.DISK, MissReason.COST, len(TOKENS))
    _, during = chosen(engine)
    clock.advance(100.0)
    _, later = chosen(engine)
    assert reasons(later) == [Reason.SILENT]
    assert not during.judged[0].loaded or during.judged[0].reason is Reason.UNKNOWN
    gate.open()
    settle(engine)


def test_a_slow_link_is_tried_with_one_chunk_at_a_time(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock, load_deadline_s=60.0)
    costs = engine.cache.costs
    costs.note_prefill(0, 100, 10.0)
    link = costs.link(Tier.DISK)
    link.started(clock.now(), 1000)
    clock.advance(100.0)
    link.arrived(clock.now(), 1000)
    link.ended(clock.now(), 1000)
    gate = FileGate(operations=(FileOperation.READ,))
    setup.files.inject(gate)
    match, choice = chosen(engine)
    assert reasons(choice) == [Reason.RETRY]
    engine.cache.note_admission(match, 0, len(TOKENS), choice)
    loading = begin(engine, match, choice)
    before = setup.files.count(FileOperation.READ)
    engine.step(loading)
    gate.wait_for_arrivals()
    assert setup.files.count(FileOperation.READ) - before <= 1
    clock.advance(0.081 * len(TOKENS) * 0.1)
    assert engine.step(loading), "its head start is over"
    assert reasons(chosen(engine)[1]) in ([Reason.SLOWER], [Reason.SILENT]), "one try at a time"
    gate.open()
    settle(engine)


def test_a_try_that_goes_well_loads_everything(setup: CacheSetup) -> None:
    engine = setup.on_disk(TOKENS)
    costs = engine.cache.costs
    costs.note_prefill(0, 100, 1000.0)
    link = costs.link(Tier.DISK)
    link.started(0.0, 1000)
    link.arrived(1e6, 1000)
    link.ended(1e6, 1000)
    match, choice = chosen(engine)
    assert reasons(choice) == [Reason.RETRY]
    loading = begin(engine, match, choice)
    assert engine.drive(loading).end_token == len(TOKENS)
    engine.check(loading)


def test_what_was_measured_survives_a_restart(setup: CacheSetup) -> None:
    engine = setup.on_disk(TOKENS)
    engine.cache.costs.serve("model on a device", 64, 64.0)
    engine.cache.costs.note_prefill(0, 100, 10.0)
    match, choice = chosen(engine)
    engine.drive(begin(engine, match, choice))
    settle(engine)
    before = engine.cache.stats().costs
    setup.close(engine)
    engine = setup.open()
    assert engine.match(engine.sequence(TOKENS)).tokens
    wait_until(lambda: bool(engine.cache.stats().costs.links), "nothing was kept")
    assert engine.cache.stats().costs.links == before.links
    assert engine.cache.costs.recompute_s(0, 100) is None, "of which model?"
    engine.cache.costs.serve("model on a device", 64, 64.0)
    assert engine.cache.costs.recompute_s(0, 100) == pytest.approx(10.0)
    engine.cache.costs.serve("another model", 64, 64.0)
    setup.close(engine)
    kept = json.loads((setup.folder / "disk" / COSTS).read_text())
    assert list(kept["prefill"]) == ["model on a device"], "the other has computed nothing"


def test_costs_are_kept_now_and_then(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock)
    engine.cache.costs.serve("model", 1, 1.0)
    engine.cache.costs.note_prefill(0, 100, 10.0)
    file = setup.folder / "disk" / COSTS
    file.unlink()
    clock.advance(COST_SAVE_S + 1)
    wait_until(file.exists, "costs are not kept")


def test_a_damaged_file_costs_no_more_than_what_it_held(setup: CacheSetup) -> None:
    engine = setup.on_disk(TOKENS)
    setup.close(engine)
    (setup.folder / "disk" / COSTS).write_text("{")
    engine = setup.open()
    match, choice = chosen(engine)
    assert reasons(choice) == [Reason.UNKNOWN]
    engine.drive(begin(engine, match, choice))


def test_who_can_compute_meanwhile_loads_the_back_only(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock)
    costs = engine.cache.costs
    nbytes = 4 * CHUNK_BYTES
    link = costs.link(Tier.DISK)
    link.started(clock.now(), nbytes)
    link.arrived(clock.now() + 3.0, nbytes)
    link.ended(clock.now() + 3.0, nbytes)
    costs.note_prefill(0, len(TOKENS), 3.2)
    match = engine.match(engine.sequence(TOKENS))
    assert costs.choose(match, 0, match.tokens).split_token is None
    choice = costs.choose(match, 0, match.tokens, split=True)
    assert choice.split_token == 2 * CHUNK
    assert choice.end_token == len(TOKENS)
    back = engine.blocks(range(choice.split_token, choice.end_token))
    engine.poison()
    load = engine.cache.begin_load(match, back, choice=choice)
    assert load is not None
    loading = Loading(load, match, back)
    outcome = engine.drive(loading)
    assert (outcome.start_token, outcome.end_token) == (2 * CHUNK, 4 * CHUNK)
    engine.check(loading)


def test_b80_what_has_come_when_a_load_is_given_up_counts(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(TOKENS, clock=clock, load_deadline_s=60.0)
    engine.cache.costs.note_prefill(0, 100, 10.0)
    keys = engine.sequence(TOKENS).chunk_keys
    gates = [FileGate(operations=(FileOperation.READ,), path=key.hex()) for key in keys[1:]]
    setup.files.inject(*gates)
    match, choice = chosen(engine)
    loading = begin(engine, match, choice)
    counters = tier_stats(engine.cache, Tier.DISK).counters

    def came() -> bool:
        engine.step(loading)
        return tier_stats(engine.cache, Tier.DISK).counters.read_bytes > counters.read_bytes

    wait_until(came, "the first chunk does not come")
    engine.step(loading)
    clock.advance(4.0)
    outcome = engine.drive(loading)
    assert outcome.end_token == CHUNK
    (miss,) = outcome.misses
    assert (miss.reason, miss.tokens) == (MissReason.COST, len(TOKENS) - CHUNK)
    for gate in gates:
        gate.open()
    settle(engine)
