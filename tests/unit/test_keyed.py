"""A cache under foreign keys: payloads of any size come back as they were, or not at all."""

from __future__ import annotations

import array
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.cache import keyed_transfer
from kvtier.cache.keyed import KeyedCache
from kvtier.codecs.opaque import opaque_codec, opaque_layout
from kvtier.constants import (
    KEYED_BATCH_MAX,
    KEYED_PIECES_MAX,
    KEYED_TRANSFERS_MAX,
    MIB,
    OPAQUE_BYTES_MAX,
)
from kvtier.errors import ConfigError, LayoutError
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import (
    NAMESPACE,
    SCHEME,
    KeyedSetup,
    finished,
    get,
    keyed_setup,
    payload,
    put,
    settle,
    written,
)

#: One byte, around a page, around a section, several sections with a rest.
SIZES = {
    str(nbytes).encode(): nbytes
    for nbytes in (1, 2, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 12_345)
}
READ = (FileOperation.READ,)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


def test_payloads_of_every_size_come_back_from_dram(setup: KeyedSetup) -> None:
    keyed, _ = setup.open()
    assert get(keyed, SIZES) == [MissReason.ABSENT] * len(SIZES)
    assert put(keyed, SIZES) == [Tier.DRAM] * len(SIZES)
    assert get(keyed, SIZES) == [Tier.DRAM] * len(SIZES)
    assert keyed.contains([*SIZES, b"other"]) == [*[True] * len(SIZES), False]


def test_payloads_of_every_size_come_back_after_a_restart(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk(SIZES)
    assert keyed.contains(list(SIZES)) == [True] * len(SIZES)
    assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)
    settle(cache)
    assert get(keyed, SIZES) == [Tier.DRAM] * len(SIZES)
    counters = tier_stats(cache, Tier.DISK).counters
    assert (counters.hit_tokens, dict(counters.miss_tokens)) == (len(SIZES), {})


@pytest.mark.parametrize("disk_codec", [None, "int8"])
def test_the_codecs_of_kv_leave_payloads_alone(setup: KeyedSetup, disk_codec: str | None) -> None:
    """Lossy codecs are configured; a payload is no KV that one of them could know."""
    keyed, cache = setup.open(codec="int8", disk_codec=disk_codec)
    assert put(keyed, SIZES) == [Tier.DRAM] * len(SIZES)
    written(cache)
    setup.close(keyed)
    keyed, _ = setup.open(codec="int8", disk_codec=disk_codec)
    assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)


def test_a_byte_codec_of_the_disk_gives_payloads_back_as_they_were(setup: KeyedSetup) -> None:
    keyed, cache = setup.open(byte_codec="zstd")
    assert put(keyed, SIZES) == [Tier.DRAM] * len(SIZES)
    written(cache)
    plain = sum(SIZES.values())
    assert sum(path.stat().st_size for path in setup.shard_files()) < plain / 2
    setup.close(keyed)
    keyed, _ = setup.open(byte_codec="zstd")
    assert get(keyed, SIZES) == [Tier.DISK] * len(SIZES)


def test_b32_b102_two_namespaces_and_two_schemes_never_share(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    others = [
        KeyedCache(cache, replace(NAMESPACE, tenant_salt="another"), SCHEME),
        KeyedCache(cache, replace(NAMESPACE, weights_id="others"), SCHEME),
        KeyedCache(cache, NAMESPACE, "test 2"),
    ]
    put(keyed, {b"k": 100})
    for version, other in enumerate(others, 1):
        assert other.contains([b"k"]) == [False]
        assert get(other, {b"k": 100}) == [MissReason.ABSENT]
        assert put(other, {b"k": 100}, version) == [Tier.DRAM]
    for version, face in enumerate((keyed, *others)):
        assert get(face, {b"k": 100}, version) == [Tier.DRAM]
    others[0].delete([b"k"])
    assert keyed.contains([b"k"]) == [True]
    for other in others:
        other.close()


def test_faces_of_one_namespace_share_and_each_may_close(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    second = KeyedCache(cache, NAMESPACE, SCHEME)
    put(keyed, {b"k": 100})
    assert get(second, {b"k": 100}) == [Tier.DRAM]
    second.close()
    second.close()
    assert get(second, {b"k": 100}) == [MissReason.UNAVAILABLE]
    assert get(keyed, {b"k": 100}) == [Tier.DRAM]


def test_an_invalidated_namespace_holds_nothing(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    put(keyed, {b"k": 100})
    cache.invalidate(NAMESPACE)
    assert keyed.contains([b"k"]) == [False]
    assert get(keyed, {b"k": 100}) == [MissReason.ABSENT]
    assert put(keyed, {b"k": 100}, 1) == [Tier.DRAM]
    assert get(keyed, {b"k": 100}, 1) == [Tier.DRAM]


def test_a_held_key_keeps_its_payload(setup: KeyedSetup) -> None:
    """A put again is no second write: whoever stores the same page twice pays once."""
    keyed, cache = setup.open()
    put(keyed, {b"k": 100})
    before = tier_stats(cache, Tier.DRAM).counters.written_bytes
    assert put(keyed, {b"k": 100}, 1) == [Tier.DRAM]
    assert tier_stats(cache, Tier.DRAM).counters.written_bytes == before
    assert get(keyed, {b"k": 100}) == [Tier.DRAM]


def test_a_key_twice_in_a_batch_is_stored_once(setup: KeyedSetup) -> None:
    keyed, _ = setup.open()
    data = payload(b"k", MIB)
    assert finished(keyed.put([(b"k", data), (b"k", data)])) == [Tier.DRAM, Tier.DRAM]
    into = [bytearray(MIB), bytearray(MIB)]
    assert finished(keyed.get([b"k", b"k"], into)) == [Tier.DRAM, Tier.DRAM]
    assert into == [data, data]


def test_another_size_is_absent_and_takes_the_place_when_it_is_put(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk({b"k": MIB + 1})
    for nbytes in (MIB, 2 * MIB, 1):
        assert get(keyed, {b"k": nbytes}) == [MissReason.ABSENT]
    assert get(keyed, {b"k": MIB + 1}) == [Tier.DISK]
    assert put(keyed, {b"k": 7}) == [Tier.DRAM]
    assert get(keyed, {b"k": MIB + 1}) == [MissReason.ABSENT]
    assert get(keyed, {b"k": 7}) == [Tier.DRAM]
    written(cache)
    setup.close(keyed)
    keyed, _ = setup.open()
    assert get(keyed, {b"k": 7}) == [Tier.DISK]


def test_what_is_deleted_is_gone_from_every_tier(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    put(keyed, {b"a": 5000, b"b": 5000})
    written(cache)
    keyed.delete([b"a", b"never"])
    assert keyed.contains([b"a", b"b"]) == [False, True]
    assert get(keyed, {b"a": 5000}) == [MissReason.ABSENT]
    setup.close(keyed)
    keyed, _ = setup.open()
    assert keyed.contains([b"a", b"b"]) == [False, True]
    assert len(setup.shard_files()) == 1


@pytest.mark.parametrize("operation", [FileOperation.CREATE, FileOperation.READ])
def test_what_is_deleted_on_its_way_is_never_found(
    setup: KeyedSetup, operation: FileOperation
) -> None:
    """A write or a read holds it; it goes once that has ended, and until then it is hidden."""
    reads = operation is FileOperation.READ
    keyed, cache = setup.on_disk({b"k": 5000}) if reads else setup.open()
    gate = FileGate(operations=(operation,), path=".kvs" if reads else "")
    setup.files.inject(gate)
    under_way = (
        keyed.get([b"k"], [bytearray(5000)]) if reads else keyed.put([(b"k", payload(b"k", 5000))])
    )
    wait_until(lambda: under_way.poll() is not None or reads, "no store")
    gate.wait_for_arrivals()
    keyed.delete([b"k"])
    assert keyed.contains([b"k"]) == [False]
    assert get(keyed, {b"k": 5000}) == [MissReason.ABSENT]
    again = keyed.put([(b"k", payload(b"k", 5000, 1))])
    assert again.poll() is None
    gate.open()
    finished(under_way)
    assert finished(again) == [Tier.DRAM]
    assert get(keyed, {b"k": 5000}, 1) == [Tier.DRAM]
    written(cache)
    setup.close(keyed)
    keyed, _ = setup.open()
    assert get(keyed, {b"k": 5000}, 1) == [Tier.DISK]


def test_a_batch_larger_than_dram_comes_through(setup: KeyedSetup) -> None:
    sizes = {bytes([n]): 2 * MIB for n in range(12)}
    keyed, _ = setup.on_disk(sizes, dram_bytes=5 * MIB)
    assert get(keyed, sizes) == [Tier.DISK] * len(sizes)


def test_what_has_no_room_is_refused_and_the_rest_is_stored(setup: KeyedSetup) -> None:
    keyed, _ = setup.open(dram_bytes=4 * MIB, disk_bytes=None)
    sizes = {b"small": 100, b"large": 5 * MIB, b"other": 100}
    assert put(keyed, sizes) == [Tier.DRAM, MissReason.NO_ROOM, Tier.DRAM]
    assert get(keyed, sizes) == [Tier.DRAM, MissReason.ABSENT, Tier.DRAM]


def test_buffers_of_every_kind_are_taken(setup: KeyedSetup) -> None:
    keyed, _ = setup.open()
    numbers = array.array("i", range(1000))
    square = memoryview(bytearray(payload(b"square", 6000))).cast("B", (60, 100))
    assert finished(keyed.put([(b"numbers", memoryview(numbers)), (b"square", square)])) == [
        Tier.DRAM,
        Tier.DRAM,
    ]
    back, again = array.array("i", [0] * 1000), memoryview(bytearray(6000)).cast("B", (60, 100))
    outcomes = finished(keyed.get([b"numbers", b"square"], [memoryview(back), again]))
    assert outcomes == [Tier.DRAM, Tier.DRAM]
    assert (back, bytes(again)) == (numbers, bytes(square))
    back.append(1)  # Nothing holds the buffer any more.


def test_payloads_in_pieces_are_those_in_one(setup: KeyedSetup) -> None:
    """Pieces end within sections and at their ends; a reader's may be others than a writer's."""
    keyed, _ = setup.on_disk({b"other": 1})
    nbytes = 2 * MIB + 5
    data = payload(b"k", nbytes)

    def cut(view: memoryview, *ends: int) -> tuple[memoryview, ...]:
        return tuple(view[start:end] for start, end in pairwise((0, *ends, nbytes)))

    assert keyed.put([(b"k", cut(memoryview(data), 1, MIB, MIB + 7))]).wait() == [Tier.DRAM]
    assert keyed.put([(b"k", data)]).wait() == [Tier.DRAM], "of the same size"
    for ends in ((), (5,), (MIB - 1, MIB - 1, 2 * MIB, 2 * MIB + 4)):
        into = bytearray(nbytes)
        assert keyed.get([b"k"], [cut(memoryview(into), *ends)]).wait() == [Tier.DRAM]
        assert into == data
    some = tuple(memoryview(bytearray(1)) for _ in range(KEYED_PIECES_MAX + 1))
    with pytest.raises(LayoutError, match="pieces"):
        keyed.get([b"k"], [some])
    with pytest.raises(LayoutError, match="0 bytes"):
        keyed.get([b"k"], [()])
    with pytest.raises(LayoutError, match="written to"):
        keyed.get([b"k"], [(bytearray(1), memoryview(b"x"))])


def test_a_callers_mistakes_raise_before_anything_happens(setup: KeyedSetup) -> None:
    keyed, _ = setup.open()
    with pytest.raises(LayoutError, match="0 bytes"):
        keyed.put([(b"k", b"")])
    with pytest.raises(LayoutError, match="cannot be written"):
        keyed.get([b"k"], [memoryview(b"fixed")])
    with pytest.raises(LayoutError, match="1 keys and 0 buffers"):
        keyed.get([b"k"], [])
    with pytest.raises(LayoutError, match="one piece"):
        keyed.get([b"k"], [memoryview(bytearray(10))[::2]])
    with pytest.raises(LayoutError, match=f"allowed are {KEYED_BATCH_MAX}"):
        keyed.contains([b"k"] * (KEYED_BATCH_MAX + 1))
    with pytest.raises(ConfigError, match="foreign key has 0 bytes"):
        keyed.contains([b""])
    with pytest.raises(ConfigError, match="foreign key has 1025 bytes"):
        keyed.delete([b"k" * 1025])


def test_more_bytes_than_a_shard_may_have_are_refused() -> None:
    assert len(opaque_layout(OPAQUE_BYTES_MAX).groups[0].layers) == 512
    with pytest.raises(LayoutError, match="allowed are 1 to"):
        opaque_layout(OPAQUE_BYTES_MAX + 1)
    assert opaque_codec(f"opaque-{OPAQUE_BYTES_MAX + 1}") is None


@pytest.mark.parametrize("limit", ["KEYED_INFLIGHT_BYTES", "KEYED_INFLIGHT_MAX"])
def test_a_batch_has_few_payloads_under_way(
    setup: KeyedSetup, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for its turn has no slot yet."""
    sizes = {bytes([n]): 100_000 for n in range(12)}
    keyed, cache = setup.on_disk(sizes)
    few = {"KEYED_INFLIGHT_BYTES": 350_000, "KEYED_INFLIGHT_MAX": 3}
    monkeypatch.setattr(keyed_transfer, limit, few[limit])
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    transfer = keyed.get(list(sizes), [bytearray(100_000) for _ in sizes])
    transfer.poll()
    assert tier_stats(cache, Tier.DRAM).chunks == 3
    gate.open()
    assert finished(transfer) == [Tier.DISK] * 12


def test_transfers_are_bounded_and_those_that_are_over_do_not_count(setup: KeyedSetup) -> None:
    keyed, cache = setup.on_disk({b"k": 100})
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    transfers = [keyed.get([b"k"], [bytearray(100)]) for _ in range(KEYED_TRANSFERS_MAX)]
    assert get(keyed, {b"k": 100}) == [MissReason.UNAVAILABLE]
    gate.open()
    assert [finished(transfer) for transfer in transfers] == [[Tier.DISK]] * KEYED_TRANSFERS_MAX
    settle(cache)
    assert get(keyed, {b"k": 100}) == [Tier.DRAM]


def test_a_cancelled_transfer_ends(setup: KeyedSetup) -> None:
    sizes = {bytes([n]): 100 for n in range(40)}
    keyed, _ = setup.on_disk(sizes)
    gate = FileGate(operations=READ, path=".kvs")
    setup.files.inject(gate)
    transfer = keyed.get(list(sizes), [bytearray(100) for _ in sizes])
    transfer.cancel()
    assert finished(transfer) == [MissReason.CANCELLED] * 40
    gate.open()


def test_wait_blocks_until_all_is_known(setup: KeyedSetup) -> None:
    keyed, _ = setup.open()
    assert keyed.put([(b"k", payload(b"k", 5 * MIB))]).wait() == [Tier.DRAM]
    into = bytearray(5 * MIB)
    assert keyed.get([b"k", b"n"], [into, bytearray(1)]).wait() == [Tier.DRAM, MissReason.ABSENT]
    assert into == payload(b"k", 5 * MIB)


def test_many_threads_put_and_get_at_once(setup: KeyedSetup) -> None:
    keyed, cache = setup.open()
    wrong: list[object] = []

    def traffic(name: int) -> None:
        sizes = {b"%d" % n: 1000 * n + 1 for n in range(name, name + 20)}
        put(keyed, sizes)
        outcomes = get(keyed, sizes)
        wrong.extend(outcome for outcome in outcomes if outcome is not Tier.DRAM)

    threads = [threading.Thread(target=traffic, args=(name,)) for name in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    settle(cache)


def test_a_disk_that_is_still_opened_is_asked_again(setup: KeyedSetup) -> None:
    keyed, _ = setup.on_disk({b"k": 100})
    setup.close(keyed)
    gate = FileGate(operations=READ, path="index")
    setup.files.inject(gate)
    keyed, _ = setup.open(await_disk=False)
    gate.wait_for_arrivals()
    assert keyed.contains([b"k"]) == [None]
    into = bytearray(100)
    transfer = keyed.get([b"k"], [into])
    assert transfer.poll() is None
    gate.open()
    assert finished(transfer) == [Tier.DISK]
    assert into == payload(b"k", 100)
    assert keyed.contains([b"k"]) == [True]


def test_payloads_say_nothing_of_what_kv_costs(setup: KeyedSetup) -> None:
    """Each would count as one token, of any size, and as a codec of its own."""
    keyed, cache = setup.on_disk(SIZES)
    cache.costs.note_prefill(0, 1000, 0.001)
    get(keyed, SIZES)
    stats = cache.stats()
    assert (stats.saved_compute_s, stats.lost_compute_s) == (0, 0)
    assert stats.costs.moves_bytes_per_s == {}
