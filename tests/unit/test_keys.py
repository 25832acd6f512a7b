"""Content addresses.

B37 (a colliding hash hands out another block) cannot bear on SHA-256 keys of 32 bytes; the header's
identity is compared on every read all the same (``test_shard_format.py``). B38 (a partial block's
hash comes back as a full one) cannot happen: a tail's key is never a chunk's, see below.
"""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from kvtier.constants import CHUNK_TOKENS_MAX
from kvtier.errors import ConfigError, FormatError, KVTierError, LayoutError
from kvtier.keys import (
    TEXT_BYTES_MAX,
    chunk_key,
    encode_namespace,
    encode_tokens,
    namespace_digest,
    shard_key,
    split_shard_key,
    tail_key,
    weights_id,
)
from kvtier.types import ChunkKey, Fidelity, GroupKind, KVGroup, KVLayout, Namespace, ShardId

GROUP = KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=8, v_dim=8, dtype="bfloat16")
LAYOUT = KVLayout((GROUP,), chunk_tokens=4)
NAMESPACE = Namespace("weights", LAYOUT)
TOKENS = tuple(range(1, 9))
ROOT = bytes(range(32))
CHUNK = ChunkKey(ROOT)


def key_of(namespace: Namespace, epoch: int = 0) -> bytes:
    return chunk_key(namespace_digest(namespace, epoch), TOKENS)


def with_group(**changes: object) -> Namespace:
    group = replace(GROUP, **changes)  # type: ignore[arg-type]
    return replace(NAMESPACE, layout=replace(LAYOUT, groups=(group,)))


def with_layout(**changes: object) -> Namespace:
    return replace(NAMESPACE, layout=replace(LAYOUT, **changes))  # type: ignore[arg-type]


# One change of every field, so that a field that is added later and forgotten is noticed.
NAMESPACE_CHANGES: dict[str, Namespace] = {
    "weights_id": replace(NAMESPACE, weights_id="other"),
    "layout": with_layout(chunk_tokens=8),
    "rope": replace(NAMESPACE, rope="x"),
    "kv_scales_id": replace(NAMESPACE, kv_scales_id="x"),
    "adapter_id": replace(NAMESPACE, adapter_id="x"),
    "tenant_salt": replace(NAMESPACE, tenant_salt="x"),
    "fidelity": replace(NAMESPACE, fidelity=Fidelity.LOSSY),
}
LAYOUT_CHANGES: dict[str, Namespace] = {
    "groups": with_layout(groups=(GROUP, replace(GROUP, layers=(2,)))),
    "chunk_tokens": with_layout(chunk_tokens=8),
    "head_groups": with_layout(head_groups=2),
    "stage_starts": with_layout(stage_starts=(0, 1)),
    "section_layers": with_layout(section_layers=1),
}
GROUP_CHANGES: dict[str, Namespace] = {
    "kind": with_group(kind=GroupKind.WINDOW, window_tokens=1),
    "layers": with_group(layers=(0, 2)),
    "kv_heads": with_group(kv_heads=4),
    "k_dim": with_group(k_dim=16),
    "v_dim": with_group(v_dim=16),
    "dtype": with_group(dtype="float16"),
    "window_tokens": with_group(kind=GroupKind.WINDOW, window_tokens=2),
}


def test_every_field_changes_the_key() -> None:
    for kind, changes in (
        (Namespace, NAMESPACE_CHANGES),
        (KVLayout, LAYOUT_CHANGES),
        (KVGroup, GROUP_CHANGES),
    ):
        assert set(changes) == {field.name for field in fields(kind)}
        keys = {key_of(namespace) for namespace in (NAMESPACE, *changes.values())}
        assert len(keys) == len(changes) + 1


def test_b11_weights_and_epoch_change_every_key() -> None:
    assert key_of(NAMESPACE) != key_of(replace(NAMESPACE, weights_id="weights 2"))
    assert len({key_of(NAMESPACE, epoch) for epoch in (0, 1, 2, 256, 2**64 - 1)}) == 5


def test_b27_deployments_that_differ_in_one_setting_share_nothing() -> None:
    deployments = (
        with_group(dtype="bfloat16"),
        with_group(dtype="float8_e4m3fn"),
        with_group(dtype="uint8"),
        with_group(layers=(0, 1, 2)),
        with_layout(head_groups=2),
    )
    assert len({key_of(namespace) for namespace in deployments}) == 5
    assert key_of(deployments[0]) == key_of(NAMESPACE)


def test_b29_b102_an_adapter_is_not_a_salt_of_the_same_text() -> None:
    texts = ("rope", "kv_scales_id", "adapter_id", "tenant_salt")
    keys = {key_of(replace(NAMESPACE, **{name: "X"})) for name in texts}  # type: ignore[arg-type]
    assert len(keys | {key_of(NAMESPACE)}) == 5


def test_b30_an_adapter_is_its_weights_not_its_name() -> None:
    first, second = (
        weights_id([("lora_a", "F16", (8, 2), hashlib.sha256(data).digest())])
        for data in (b"weights 1", b"weights 2")
    )
    keys = {key_of(replace(NAMESPACE, adapter_id=adapter)) for adapter in (first, second, "")}
    assert len(keys) == 3


def test_b32_a_shard_key_holds_the_whole_address() -> None:
    salted = [key_of(replace(NAMESPACE, tenant_salt=salt)) for salt in ("a", "b")]
    keys = [shard_key(ChunkKey(key), ShardId(0, 0, 0)) for key in salted]
    assert keys[0] != keys[1]
    assert [split_shard_key(key)[0] for key in keys] == salted


def test_b33_texts_with_delimiters_never_collide(rng: random.Random) -> None:
    hostile = ["p%q\0r", "p\0q%r", "a/b", "a", "b", "/", "@", "%", ":", " ", "\u00e9", "e\u0301"]
    names = hostile + [
        "".join(rng.choices("ab%:/@\0 \u00e9", k=rng.randint(0, 6))) for _ in range(1000)
    ]
    pairs = {(names[i], names[-i]) for i in range(len(names))}
    encodings = {
        encode_namespace(replace(NAMESPACE, adapter_id=adapter, tenant_salt=salt))
        for adapter, salt in pairs
    }
    assert len(encodings) == len(pairs)


def test_b35_shards_of_one_chunk_have_keys_of_their_own() -> None:
    shards = [ShardId(g, s, h) for g in (0, 1, 256) for s in (0, 1, 256) for h in (0, 1, 65535)]
    keys = [shard_key(CHUNK, shard) for shard in shards]
    assert len(set(keys)) == len(shards)
    assert {len(key) for key in keys} == {38}
    assert [split_shard_key(key) for key in keys] == [(CHUNK, shard) for shard in shards]
    assert shard_key(CHUNK, ShardId(1, 2, 0x0304)) == ROOT + b"\x00\x01\x00\x02\x03\x04"


@pytest.mark.parametrize("key", [b"", bytes(37), bytes(39)])
def test_what_is_no_shard_key_is_not_split(key: bytes) -> None:
    with pytest.raises(FormatError, match="38 bytes"):
        split_shard_key(key)


@pytest.mark.parametrize("shard", [ShardId(-1, 0, 0), ShardId(0, 65536, 0), ShardId(0, 0, -1)])
def test_a_shard_beyond_its_key_is_refused(shard: ShardId) -> None:
    with pytest.raises(LayoutError, match="65535"):
        shard_key(CHUNK, shard)
    with pytest.raises(LayoutError, match="32 bytes"):
        shard_key(ChunkKey(b"short"), ShardId(0, 0, 0))


def test_chunk_key_is_the_chained_digest() -> None:
    tokens = (0, 1, 255, 256, 2**31 - 1)
    expected = hashlib.sha256(ROOT + struct.pack("<5i", *tokens)).digest()
    for form in (tokens, list(tokens), array("q", tokens), memoryview(array("i", tokens))):
        assert chunk_key(ROOT, form) == expected
    assert chunk_key(expected, tokens) != expected
    strided = memoryview(array("i", (5, 0, 6, 0)))[::2]
    assert chunk_key(ROOT, strided) == chunk_key(ROOT, (5, 6))


def test_bytes_are_token_ids_not_machine_words() -> None:
    assert encode_tokens(b"\x01\x02\x03\x04") == struct.pack("<4i", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((1, -1), "token -1 at index 1"),
        ((2**31,), "token 2147483648 at index 0"),
        ((-(2**31) - 1,), "token -2147483649 at index 0"),
        ((0, 1.5), "token 1.5 at index 1"),
        (("a",), "token 'a' at index 0"),
        ((None,), "token None at index 0"),
        (memoryview(array("i", (3, -7))), "token -7 at index 1"),
        (memoryview(array("q", (3,))), "format 'q'"),
        (memoryview(b"abcd"), "format 'B'"),
        (memoryview(array("i", (1, 2))).cast("B").cast("i", (2, 1)), "2 dimensions"),
        ((), "at least one"),
    ],
)
def test_what_is_no_token_is_refused(tokens: Sequence[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        chunk_key(ROOT, tokens)


@pytest.mark.parametrize("parent", [b"", bytes(31), bytes(33)])
def test_a_parent_is_a_digest(parent: bytes) -> None:
    for make in (chunk_key, tail_key):
        with pytest.raises(LayoutError, match="32 bytes"):
            make(parent, (1,))


def test_b38_a_tail_is_never_a_chunk() -> None:
    word = int.from_bytes(b"tail", "little")
    tail = tail_key(ROOT, TOKENS)
    assert tail != chunk_key(ROOT, TOKENS)
    # Chunks whose first tokens spell a tail's marker and count.
    for count in range(20):
        assert tail != chunk_key(ROOT, (word, count, *TOKENS))
    assert len({tail_key(ROOT, TOKENS[:count]) for count in range(1, 9)}) == 8
    assert tail_key(ROOT, (1, 0)) != tail_key(ROOT, (1,))


def test_a_tail_has_fewer_tokens_than_the_largest_chunk() -> None:
    assert len(tail_key(ROOT, (7,) * (CHUNK_TOKENS_MAX - 1))) == 32
    for count in (0, CHUNK_TOKENS_MAX):
        with pytest.raises(LayoutError, match="number of tail tokens"):
            tail_key(ROOT, (7,) * count)


@pytest.mark.parametrize(
    ("namespace", "epoch", "message"),
    [
        (NAMESPACE, -1, "epoch is -1"),
        (NAMESPACE, 2**64, "epoch is 18446744073709551616"),
        (NAMESPACE, True, "epoch is True"),
        (replace(NAMESPACE, weights_id=""), 0, "weights_id is ''"),
        (replace(NAMESPACE, fidelity="exakt"), 0, "fidelity is 'exakt'; allowed are exact, lossy"),  # type: ignore[arg-type]
        (replace(NAMESPACE, rope=None), 0, "rope is None"),  # type: ignore[arg-type]
        (replace(NAMESPACE, tenant_salt="\ud800"), 0, "tenant_salt is .*UTF-8"),
        (replace(NAMESPACE, adapter_id="ü" * (TEXT_BYTES_MAX // 2 + 1)), 0, "adapter_id has 65538"),
        (with_layout(chunk_tokens=0), 0, "chunk_tokens is 0"),
        (with_group(dtype="bfloat61"), 0, "did you mean 'bfloat16'"),
    ],
)
def test_what_is_no_namespace_is_refused(namespace: Namespace, epoch: int, message: str) -> None:
    with pytest.raises(KVTierError, match=message) as caught:
        namespace_digest(namespace, epoch)
    assert isinstance(caught.value, ConfigError | LayoutError)


def test_the_longest_text_is_accepted() -> None:
    longest = replace(NAMESPACE, tenant_salt="ü" * (TEXT_BYTES_MAX // 2))
    assert key_of(longest) != key_of(NAMESPACE)


TENSORS = (
    ("a", "F32", (2, 3), bytes(32)),
    ("b", "F32", (6,), bytes(32)),
    ("c", "F32", (), b"\x01" * 32),
)


def test_weights_id_ignores_order_and_nothing_else() -> None:
    identity = weights_id(TENSORS)
    assert identity == weights_id(reversed(TENSORS))
    assert len(identity) == 64
    changed = [
        (("a2", *TENSORS[0][1:]), *TENSORS[1:]),
        (("a", "F16", (2, 3), bytes(32)), *TENSORS[1:]),
        (("a", "F32", (3, 2), bytes(32)), *TENSORS[1:]),
        (("a", "F32", (2, 3, 1), bytes(32)), *TENSORS[1:]),
        (("a", "F32", (2, 3), b"\x01" * 32), *TENSORS[1:]),
        TENSORS[:2],
        (("aF", "32", (2, 3), bytes(32)), *TENSORS[1:]),
    ]
    identities = [weights_id(tensors) for tensors in changed]
    assert len({identity, *identities}) == len(changed) + 1


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "no tensors"),
        ((TENSORS[0], TENSORS[0]), "'a' comes twice"),
        ((("a", "F32", (1,), b"short"),), "5 bytes"),
        ((("a", "F32", (-1,), bytes(32)),), "size of tensor 'a' is -1"),
        ((("a", "F32", (2**64,), bytes(32)),), "size of tensor 'a'"),
        ((("\ud800", "F32", (), bytes(32)),), "tensor name"),
    ],
)
def test_what_has_no_weights_id_is_refused(
    tensors: tuple[tuple[str, str, tuple[int, ...], bytes], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        weights_id(tensors)
