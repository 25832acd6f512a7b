"""Write the golden vectors of keys and the golden shard files of the current format version.

``python tests/golden/make_golden.py [FOLDER]`` writes into this folder unless told otherwise. Run
it only when the key scheme or the format version is raised on purpose: a key that changes makes
every cache in the field miss. Shard files of earlier versions stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path

from kvtier.codecs.zstd import ZstdCodec
from kvtier.constants import SHARD_FORMAT_VERSION, STORED_FORMAT_VERSION
from kvtier.keys import (
    chunk_key,
    encode_namespace,
    foreign_key,
    namespace_digest,
    shard_key,
    tail_key,
    weights_id,
)
from kvtier.layout import shard_ids, shard_layout
from kvtier.shard_format import ShardDescription, seal, shard_geometry
from kvtier.stored_shard import encode_shard, stored_bytes_max
from kvtier.types import Fidelity, GroupKind, KVGroup, KVLayout, Namespace, ShardId

FOLDER = Path(__file__).parent
TOKENS = tuple(range(1, 9))
TAIL_TOKENS = (9, 10, 11)
#: Scheme and key: one character each, text beyond ASCII, and what could be taken for the other.
FOREIGN = (("s", b"k"), ("sglang 0.5:page=64:ü", bytes(range(64))), ("sk", b"\0"), ("", b"sk\0"))


def plain_layout() -> KVLayout:
    """One full group of six layers in two sections, chunks of four tokens."""
    group = KVGroup(GroupKind.FULL, tuple(range(6)), kv_heads=2, k_dim=8, v_dim=8, dtype="float32")
    return KVLayout((group,), chunk_tokens=4)


def mixed_layout() -> KVLayout:
    """A full, a window and a latent group, two stages, four head groups."""
    return KVLayout(
        groups=(
            KVGroup(GroupKind.FULL, (0, 3, 6), kv_heads=8, k_dim=16, v_dim=16, dtype="bfloat16"),
            KVGroup(GroupKind.WINDOW, (1, 2, 4, 5), 2, 16, 8, "float8_e4m3fn", window_tokens=8),
            KVGroup(GroupKind.LATENT, (7,), kv_heads=1, k_dim=24, v_dim=0, dtype="bfloat16"),
        ),
        chunk_tokens=8,
        head_groups=4,
        stage_starts=(0, 4),
        section_layers=2,
    )


def namespaces() -> dict[str, tuple[Namespace, int]]:
    """The namespaces whose keys are pinned, each with its epoch."""
    plain = Namespace("0" * 64, plain_layout())
    full = Namespace(
        weights_id="smollm2/135m@v1:ü",
        layout=mixed_layout(),
        rope="theta=10000;dim=16",
        kv_scales_id="scales",
        adapter_id="X",
        tenant_salt="salt%q",
        fidelity=Fidelity.LOSSY,
    )
    return {"plain": (plain, 0), "plain, epoch 1": (plain, 1), "every field": (full, 2**64 - 1)}


def shards() -> dict[str, ShardDescription]:
    """The shards whose files are pinned, by file name."""
    plain, plain_epoch = namespaces()["plain"]
    full, full_epoch = namespaces()["every field"]
    plain_root = namespace_digest(plain, plain_epoch)
    full_root = namespace_digest(full, full_epoch)
    first = chunk_key(full_root, TOKENS)
    prefix = f"v{SHARD_FORMAT_VERSION}"
    return {
        f"{prefix}-raw.kvs": ShardDescription(
            chunk=chunk_key(plain_root, TOKENS[:4]),
            shard=ShardId(0, 0, 0),
            parent=None,
            position=0,
            namespace=plain_root,
            codec="raw",
            codec_params={},
            layout=shard_layout(plain.layout, ShardId(0, 0, 0)),
            token_count=4,
            has_sinks=False,
            section_bytes=(4096, 2048),
        ),
        f"{prefix}-params.kvs": ShardDescription(
            chunk=tail_key(first, TAIL_TOKENS),
            shard=ShardId(1, 1, 2),
            parent=first,
            position=1,
            namespace=full_root,
            codec="int5k4v-c",
            codec_params={"calibration": "c" * 64, "rope_theta": 1e4, "bits": 5, "centred": True},
            layout=shard_layout(full.layout, ShardId(1, 1, 2)),
            token_count=3,
            has_sinks=False,
            section_bytes=(77,),
        ),
    }


def payload(name: str, section: int, nbytes: int) -> bytes:
    """Return bytes that only this section of this file has."""
    seed = f"{name} section {section} byte ".encode()
    blocks = (hashlib.sha256(seed + str(i).encode()).digest() for i in range(-(-nbytes // 32)))
    return b"".join(blocks)[:nbytes]


def sealed(name: str) -> bytearray:
    """Return the whole shard of one golden file; what was in its padding is not zero."""
    description = shards()[name]
    geometry = shard_geometry(description.section_bytes)
    shard = bytearray(b"\xee" * geometry.shard_bytes)
    for section, nbytes in enumerate(geometry.section_bytes):
        start = geometry.section_offsets[section]
        shard[start : start + nbytes] = payload(name, section, nbytes)
    seal(memoryview(shard), description)
    return shard


def encoded(name: str) -> bytes:
    """Return a golden shard as zstd keeps it, its sections made of what shrinks."""
    description = replace(shards()[name], section_bytes=(65536, 32768))
    geometry = shard_geometry(description.section_bytes)
    shard = memoryview(bytearray(geometry.shard_bytes))
    for section, nbytes in enumerate(geometry.section_bytes):
        start = geometry.section_offsets[section]
        shard[start : start + nbytes] = floats(name, section, nbytes)
    header = seal(shard, description)
    into = memoryview(bytearray(stored_bytes_max(header, ZstdCodec())))
    stored = encode_shard(shard, header, ZstdCodec(), into)
    assert stored is not None
    return bytes(stored)


def floats(name: str, section: int, nbytes: int) -> bytes:
    """Return float32 of few exponents that only this section of this file has."""
    noise = payload(name, section, nbytes)
    values = (struct.unpack_from("<i", noise, at)[0] / 2**31 for at in range(0, nbytes, 4))
    return b"".join(struct.pack("<f", value) for value in values)


def _key_vector(name: str, namespace: Namespace, epoch: int) -> dict[str, object]:
    root = namespace_digest(namespace, epoch)
    size = namespace.layout.chunk_tokens
    parent = root
    chunks = []
    for start in range(0, len(TOKENS), size):
        parent = chunk_key(parent, TOKENS[start : start + size])
        chunks.append(parent)
    return {
        "name": name,
        "namespace": asdict(namespace),
        "epoch": epoch,
        "encoding": encode_namespace(namespace, epoch).hex(),
        "root": root.hex(),
        "tokens": TOKENS,
        "chunks": [key.hex() for key in chunks],
        "tail_tokens": TAIL_TOKENS,
        "tail": tail_key(parent, TAIL_TOKENS).hex(),
        "shards": [shard_key(chunks[0], shard).hex() for shard in shard_ids(namespace.layout)],
    }


def _foreign_vector(scheme: str, key: bytes) -> dict[str, str]:
    root = namespace_digest(*namespaces()["plain"])
    digest = foreign_key(root, scheme, key)
    return {"root": root.hex(), "scheme": scheme, "key": key.hex(), "digest": digest.hex()}


def golden_files() -> dict[str, bytes]:
    """Return every golden file of the current version by its name."""
    keys = {
        "namespaces": [_key_vector(name, *pair) for name, pair in namespaces().items()],
        "foreign": [_foreign_vector(*pair) for pair in FOREIGN],
        "weights_id": weights_id(
            (
                ("model.embed", "F32", (4, 2), hashlib.sha256(b"embed").digest()),
                ("a", "Q4_K", (), hashlib.sha256(b"scalar").digest()),
            )
        ),
    }
    files: dict[str, bytes] = {name: bytes(sealed(name)) for name in shards()}
    files["keys.json"] = (json.dumps(keys, indent=1, ensure_ascii=True) + "\n").encode()
    return files


def main(folder: Path) -> None:
    """Write every golden file into ``folder``."""
    for name, data in golden_files().items():
        (folder / name).write_bytes(data)
    # Another zstd may make other bytes of the same values: these are read, and not made again.
    stored = encoded(f"v{SHARD_FORMAT_VERSION}-raw.kvs")
    (folder / f"v{STORED_FORMAT_VERSION}-zstd.kvs").write_bytes(stored)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
