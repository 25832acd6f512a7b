"""LMCache's keys, layouts and file names: what differs is told apart, what is odd is left out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from kvtier.errors import ConfigError
from kvtier_adapters.lmcache.books import Locks, Results, Sizes
from kvtier_adapters.lmcache.files import FileKey, file_key
from kvtier_adapters.lmcache.limits import KEYS_MAX, LOCKS_MAX, RESULTS_MAX
from kvtier_adapters.lmcache.naming import (
    SEAL_BYTES,
    layout_bytes,
    layout_text,
    object_name,
    seal,
    sealed_bytes,
)

KEY = FileKey(b"\x01" * 32, "org/model", 0x01000100, 0, "")


def test_b32_b33_every_field_of_a_key_tells_objects_apart() -> None:
    keys = [
        KEY,
        replace(KEY, chunk_hash=b"\x02" * 32),
        replace(KEY, model_name="org/model-2"),
        replace(KEY, kv_rank=0x02010201),
        replace(KEY, object_group_id=1),
        replace(KEY, cache_salt="acme"),
        replace(KEY, model_name="org", cache_salt="model"),
        replace(KEY, chunk_hash=b"\x01" * 31),
    ]
    for one, other in combinations(map(object_name, keys), 2):
        assert one != other
    assert object_name(replace(KEY)) == object_name(KEY)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("org-SEP-model@0x01000100@0@" + "01" * 32 + ".data", KEY),
        ("org-SEP-model@0x01000100@a@" + "01" * 32 + ".data", replace(KEY, object_group_id=10)),
        ("org-SEP-model@0x01000100@0@" + "01" * 32 + "@acme.data", replace(KEY, cache_salt="acme")),
        ("org-SEP-model@0x01000100@0@" + "01" * 32 + ".tmp", None),
        ("org-SEP-model@0x01000100@0@" + "01" * 32 + "@a@b.data", None),
        ("org-SEP-model@0x01000100@0@" + "0g" * 32 + ".data", None),
        ("org-SEP-model@rank@0@" + "01" * 32 + ".data", None),
        ("@0x01000100@0@" + "01" * 32 + ".data", None),
        ("notes.data", None),
        ("config.json", None),
    ],
)
def test_a_files_name_tells_its_key_or_nothing(name: str, key: FileKey | None) -> None:
    assert file_key(name) == key


def test_b27_a_seal_is_of_one_layout_and_size() -> None:
    layout = layout_text([(2, 4, 16, 64)], ["torch.bfloat16"])
    assert layout == "bfloat16[2,4,16,64]"
    good = seal(16384, layout)
    assert (len(good), sealed_bytes(good, layout)) == (SEAL_BYTES, 16384)
    assert sealed_bytes(good, "float16[2,4,16,64]") is None
    assert sealed_bytes(good, "bfloat16[2,4,64,16]") is None
    assert sealed_bytes(bytes(SEAL_BYTES), layout) is None
    assert sealed_bytes(good[:-1], layout) is None


def test_b78_no_bit_of_a_seal_may_fall(rng: random.Random) -> None:
    good = seal(16384, "bfloat16[2,4,16,64]")
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        assert sealed_bytes(bad, "bfloat16[2,4,16,64]") != 16384


def test_a_layout_tells_its_bytes() -> None:
    assert layout_bytes("bfloat16[2,32,256,1024]") == 2 * 2 * 32 * 256 * 1024
    assert layout_bytes("float8_e4m3fn[3];float32[2,2]") == 3 + 16
    for wrong in ("", "bfloat16", "bfloat16[]", "bfloat17[2]", "bfloat16[2];", "bfloat16[-2]"):
        with pytest.raises(ConfigError, match="allowed is a dtype"):
            layout_bytes(wrong)


def test_results_are_taken_once_and_bounded() -> None:
    results: Results[int] = Results()
    for task in range(RESULTS_MAX + 1):
        results.add(task, -task)
    assert results.take(0) is None, "the oldest is forgotten"
    assert (results.take(1), results.take(1)) == (-1, None)
    assert len(results.take_all()) == RESULTS_MAX - 1
    assert results.take_all() == {}


def test_locks_count_and_are_bounded() -> None:
    locks = Locks()
    assert all(locks.lock(number) for number in range(LOCKS_MAX))
    assert not locks.lock("one too many")
    assert locks.lock(0), "one that is locked already takes no room"
    locks.unlock(0)
    assert 0 in locks
    locks.unlock(0)
    locks.unlock(0)
    assert 0 not in locks
    assert len(locks) == LOCKS_MAX - 1


def test_sizes_tell_what_is_new_what_goes_and_are_bounded() -> None:
    sizes = Sizes()
    assert sizes.add([("a", 1), ("b", 2), ("a", 1)]) == [("a", 1), ("b", 2)]
    assert sizes.add([("a", 1), ("c", 3)]) == [("c", 3)]
    assert sizes.remove(["a", "x", "a"]) == [("a", 1)]
    sizes.add((number, 1) for number in range(KEYS_MAX))
    assert sizes.trim() == [("b", 2), ("c", 3)]
    assert len(sizes) == KEYS_MAX
