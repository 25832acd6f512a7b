"""Which namespaces are in use and whose they are; bounded, and kept beside the chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.cache.tenancy import roots as roots_module
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.roots import RootRow, Roots
from kvtier.constants import GIVE_WAY_ROWS_MAX, ROOTS_MAX
from kvtier.keys import namespace_digest, tenant_digest
from kvtier.tiers.coldest import coldest_first
from kvtier.tiers.disk.cold import ColdTable
from kvtier.tiers.disk.root_file import load_roots, save_roots
from kvtier.tiers.disk.rows import Kind, Row, Rows
from kvtier.types import ChunkKey, Entry, Namespace, ShardId
from tests.lib.cache_setup import NAMESPACE

OURS = replace(NAMESPACE, tenant_salt="ours")


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def begun(roots: Roots, namespace: Namespace) -> Sequence:
    return Sequence(namespace, roots.root(namespace))


def test_a_root_is_the_digest_until_an_epoch_is_raised() -> None:
    roots = Roots(Epochs(), 1, set)
    assert roots.root(OURS) == namespace_digest(OURS)
    roots.advance(OURS)
    assert roots.root(OURS) == namespace_digest(OURS, 1)
    roots.advance_tenant("ours")
    assert roots.root(OURS) == namespace_digest(OURS, 1, 1)
    assert roots.root(NAMESPACE) == namespace_digest(NAMESPACE)


def test_what_is_stale_is_known_also_from_what_a_medium_kept() -> None:
    epochs = Epochs()
    roots = Roots(epochs, 1, set)
    sequence = begun(roots, OURS)
    assert roots.note_store(sequence)
    rows, _ = roots.snapshot(set())
    assert not roots.stale()
    roots.advance_tenant("ours")
    assert roots.stale() == {sequence.root}
    assert not roots.current(sequence)
    again = Roots(epochs, 1, set)
    again.merge(rows)
    assert again.stale() == {sequence.root}
    assert again.of_tenant(tenant_digest("ours")) == {sequence.root}


def test_a_medium_is_owed_what_was_stored_since() -> None:
    roots = Roots(Epochs(), 2, set)
    assert not roots.unsaved(0)
    sequence = begun(roots, OURS)
    assert not roots.unsaved(0), "nothing was stored"
    roots.note_store(sequence)
    rows, version = roots.snapshot(set())
    roots.saved(0, version)
    assert set(rows) == {sequence.root}
    assert [roots.unsaved(keeper) for keeper in (0, 1)] == [False, True]
    roots.note_store(sequence)
    assert not roots.unsaved(0), "it is known"


def test_roots_are_bounded_and_those_that_hold_nothing_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 100
    assert most < ROOTS_MAX
    monkeypatch.setattr(roots_module, "ROOTS_MAX", most)
    held: set[bytes] = set()
    roots = Roots(Epochs(), 1, lambda: held)
    many = [replace(NAMESPACE, tenant_salt=str(number)) for number in range(most)]
    held |= {roots.root(each) for each in many[:2]}
    for each in many:
        roots.root(each)
    assert roots.note_store(begun(roots, OURS)), "empty ones have made room"
    assert roots.of_tenant(tenant_digest("0")), "not those that hold something"
    assert not roots.of_tenant(tenant_digest("2"))
    held |= {namespace_digest(each) for each in many}
    for each in many:
        roots.root(each)
    stranger = replace(NAMESPACE, tenant_salt="a stranger")
    assert not roots.note_store(begun(roots, stranger)), "all hold something"
    held.clear()
    for number in range(2000):
        roots.root(replace(NAMESPACE, tenant_salt=f"a stranger {number}"))
    assert roots.note_store(begun(roots, stranger)), "it is looked at again now and then"


def test_rows_come_back_and_damage_is_nothing(tmp_path: Path) -> None:
    assert load_roots(str(tmp_path)) == {}
    rows = {
        b"r" * 32: RootRow(b"n" * 32, b"t" * 32, 3, 2**40),
        b"s" * 32: RootRow(b"n" * 32, b"", 0, 0),
    }
    save_roots(str(tmp_path), rows)
    assert load_roots(str(tmp_path)) == rows
    file = tmp_path / "roots"
    sound = file.read_bytes()
    for index in range(0, len(sound), 7):
        file.write_bytes(sound[:index] + bytes([sound[index] ^ 1]) + sound[index + 1 :])
        assert load_roots(str(tmp_path)) == {}
    file.write_bytes(sound[:-1])
    assert load_roots(str(tmp_path)) == {}


@pytest.mark.parametrize("used", [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
def test_children_go_before_their_parents_whenever_they_were_used(used: list[float]) -> None:
    line = [Entry(key(n), key(n - 1) if n else None, 1, n) for n in range(3)]
    assert coldest_first(line, used) == [key(2), key(1), key(0)]


def test_between_branches_the_coldest_goes_first() -> None:
    root, cold, hot = (
        Entry(key(0), None, 1, 0),
        Entry(key(1), key(0), 1, 1),
        Entry(key(2), key(0), 1, 1),
    )
    assert coldest_first([root, hot, cold], [0.0, 2.0, 1.0]) == [key(1), key(2), key(0)]


def test_the_cold_are_asked_for_by_namespace_a_bounded_number_at_a_time() -> None:
    kinds = [Kind(bytes([number]) * 32, "raw", ((ShardId(0, 0, 0), 4096),)) for number in (1, 2)]
    count = GIVE_WAY_ROWS_MAX + 10
    rows = [Row(key(n), None, 0, kinds[n % 2], n, n) for n in range(2 * count)]
    table = ColdTable([(0, Rows.of(rows))], lambda _: False)
    mine = kinds[0].namespace
    assert table.bytes_of(mine) == 4096 * count
    leaves = table.leaves_of({mine}, GIVE_WAY_ROWS_MAX)
    assert leaves == [key(2 * n) for n in range(GIVE_WAY_ROWS_MAX)]
    assert table.keys_of({b"3" * 32}, 5) == []
    table.take(key(0))
    assert table.bytes_of(mine) == 4096 * (count - 1)
    assert table.keys_of({mine}, 1) == [key(2)]


def test_a_cold_parent_is_no_leaf_until_its_child_has_left() -> None:
    kind = Kind(b"n" * 32, "raw", ((ShardId(0, 0, 0), 4096),))
    rows = [Row(key(1), None, 0, kind, 1, 1), Row(key(2), key(1), 1, kind, 2, 2)]
    table = ColdTable([(0, Rows.of(rows))], lambda _: False)
    assert table.leaves_of({kind.namespace}, 5) == [key(2)]
    table.take(key(2))
    assert table.leaves_of({kind.namespace}, 5) == [key(1)]
