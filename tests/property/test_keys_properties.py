"""Encodings of namespaces can be read back, so no two namespaces share one; sequences are chains.

The oracles are written out here by hand: a decoder of the documented encoding, and SHA-256.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cache.sequence import Sequence
from kvtier.keys import (
    chunk_key,
    encode_namespace,
    namespace_digest,
    shard_key,
    split_shard_key,
    tenant_digest,
    weights_id,
)
from kvtier.types import (
    DTYPE_BYTES,
    ChunkKey,
    Fidelity,
    GroupKind,
    KVGroup,
    KVLayout,
    Namespace,
    ShardId,
)

# A small alphabet, so that equal parts at other places are common.
TEXTS = st.text("ab\0\x01\u00e9", max_size=4)
DIMS = st.sampled_from((1, 2, 255, 256, 2**32 - 1))
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def groups(draw: st.DrawFn, layers: tuple[int, ...], head_groups: int) -> KVGroup:
    kind = draw(st.sampled_from(GroupKind))
    latent = kind == GroupKind.LATENT
    return KVGroup(
        kind=kind,
        layers=layers,
        kv_heads=1 if latent else head_groups * draw(st.integers(1, 3)),
        k_dim=draw(DIMS),
        v_dim=0 if latent else draw(DIMS),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        window_tokens=draw(DIMS) if kind == GroupKind.WINDOW else 0,
    )


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    layers = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=6)))
    split = draw(st.integers(0, len(layers) - 1))
    parts = [tuple(part) for part in (layers[:split], layers[split:]) if part]
    head_groups = draw(st.sampled_from((1, 2, 3)))
    starts = sorted(draw(st.sets(st.integers(1, 300), max_size=3)))
    return KVLayout(
        groups=tuple(draw(groups(part, head_groups)) for part in parts),
        chunk_tokens=draw(st.sampled_from((1, 4, 256, 65536))),
        head_groups=head_groups,
        stage_starts=(0, *starts),
        section_layers=draw(st.integers(1, 5)),
    )


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    return Namespace(
        weights_id=draw(TEXTS.filter(bool)),
        layout=draw(layouts()),
        rope=draw(TEXTS),
        kv_scales_id=draw(TEXTS),
        adapter_id=draw(TEXTS),
        tenant_salt=draw(TEXTS),
        fidelity=draw(st.sampled_from(Fidelity)),
    )


EPOCHS = st.integers(0, 2**64 - 1)


def read_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        tag, length = struct.unpack_from(">BI", data)
        assert len(data) >= 5 + length
        yield tag, data[5 : 5 + length]
        data = data[5 + length :]


def read_struct(data: bytes, count: int) -> list[bytes]:
    pairs = list(read_fields(data))
    assert [tag for tag, _ in pairs] == list(range(1, count + 1))
    return [value for _, value in pairs]


def read_integers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(data) // 4}I", data)


def read_group(data: bytes) -> KVGroup:
    kind, layers, heads, k_dim, v_dim, dtype, window = read_struct(data, 7)
    return KVGroup(
        kind=GroupKind(kind.decode()),
        layers=read_integers(layers),
        kv_heads=read_integers(heads)[0],
        k_dim=read_integers(k_dim)[0],
        v_dim=read_integers(v_dim)[0],
        dtype=dtype.decode(),
        window_tokens=read_integers(window)[0],
    )


def read_namespace(data: bytes) -> tuple[Namespace, int, int]:
    prefix = b"KVTier namespace 1"
    assert data.startswith(prefix)
    values = read_struct(data[len(prefix) :], len(list(read_fields(data[len(prefix) :]))))
    weights, cut, *texts, fidelity, epoch = values[:8]
    tenant_epoch = int.from_bytes(b"".join(values[8:]), "big")
    assert len(values) == (9 if tenant_epoch else 8)
    parts, chunk_tokens, head_groups, starts, section_layers = read_struct(cut, 5)
    layout = KVLayout(
        groups=tuple(read_group(value) for _, value in read_fields(parts)),
        chunk_tokens=read_integers(chunk_tokens)[0],
        head_groups=read_integers(head_groups)[0],
        stage_starts=read_integers(starts),
        section_layers=read_integers(section_layers)[0],
    )
    rope, scales, adapter, salt = (text.decode() for text in texts)
    found = Namespace(weights.decode(), layout, rope, scales, adapter, salt)
    found = replace(found, fidelity=Fidelity(fidelity.decode()))
    return found, int.from_bytes(epoch, "big"), tenant_epoch


@given(namespaces(), EPOCHS, EPOCHS)
def test_b29_b33_an_encoding_is_read_back(
    namespace: Namespace, epoch: int, tenant_epoch: int
) -> None:
    encoded = encode_namespace(namespace, epoch, tenant_epoch)
    assert read_namespace(encoded) == (namespace, epoch, tenant_epoch)
    assert namespace_digest(namespace, epoch, tenant_epoch) == hashlib.sha256(encoded).digest()


@given(namespaces(), TEXTS.filter(bool), TEXTS.filter(bool))
def test_a_tenant_is_known_by_its_salt_alone(namespace: Namespace, one: str, other: str) -> None:
    assert (tenant_digest(one) == tenant_digest(other)) == (one == other)
    assert tenant_digest(one) != namespace_digest(replace(namespace, tenant_salt=one))


@given(namespaces(), st.permutations(("rope", "kv_scales_id", "adapter_id", "tenant_salt")))
def test_b29_texts_that_change_places_change_the_key(
    namespace: Namespace, order: list[str]
) -> None:
    texts = [namespace.rope, namespace.kv_scales_id, namespace.adapter_id, namespace.tenant_salt]
    moved = replace(namespace, **dict(zip(order, texts, strict=True)))  # type: ignore[arg-type]
    same_key = namespace_digest(moved) == namespace_digest(namespace)
    assert same_key == (moved == namespace)


@settings(max_examples=200)
@given(
    st.lists(TOKENS, max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
    st.integers(1, 9),
    namespaces(),
)
def test_tokens_in_any_pieces_give_the_keys_of_the_whole(
    tokens: list[int], cuts: list[int], size: int, namespace: Namespace
) -> None:
    layout = replace(namespace.layout, chunk_tokens=size)
    namespace = replace(namespace, layout=layout)
    root = namespace_digest(namespace)
    sequence = Sequence(namespace, root)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(edges):
        sequence.append(tokens[start:end])
        assert sequence.token_count == end

    expected: list[bytes] = []
    digest = root
    for start in range(0, len(tokens) - len(tokens) % size, size):
        words = struct.pack(f"<{size}i", *tokens[start : start + size])
        digest = hashlib.sha256(digest + words).digest()
        expected.append(digest)
    assert sequence.chunk_keys == expected
    parents = [sequence.entry_parent(index) for index in range(len(expected) + 1)]
    assert parents == [None, *expected]


@given(
    st.lists(TOKENS, min_size=1), st.lists(TOKENS, min_size=1), st.binary(min_size=32, max_size=32)
)
def test_chunks_share_a_key_only_if_they_share_their_tokens(
    first: list[int], second: list[int], parent: bytes
) -> None:
    assert (chunk_key(parent, first) == chunk_key(parent, second)) == (first == second)


@given(st.binary(min_size=32, max_size=32), st.tuples(*[st.integers(0, 65535)] * 3))
def test_a_shard_key_is_split_into_its_parts(chunk: bytes, numbers: tuple[int, int, int]) -> None:
    shard = ShardId(*numbers)
    key = shard_key(ChunkKey(chunk), shard)
    assert key == chunk + struct.pack(">HHH", *numbers)
    assert split_shard_key(key) == (chunk, shard)


TENSORS = st.lists(
    st.tuples(
        TEXTS,
        TEXTS,
        st.lists(st.integers(0, 300), max_size=3).map(tuple),
        st.sampled_from((bytes(32), b"\x01" * 32)),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda tensor: tensor[0],
)


@given(TENSORS, TENSORS, st.data())
def test_weights_share_an_id_only_if_they_share_every_tensor(
    first: list[tuple[str, str, tuple[int, ...], bytes]],
    second: list[tuple[str, str, tuple[int, ...], bytes]],
    data: st.DataObject,
) -> None:
    assert (weights_id(first) == weights_id(second)) == (sorted(first) == sorted(second))
    assert weights_id(data.draw(st.permutations(first))) == weights_id(first)
