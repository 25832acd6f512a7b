"""Keys are pinned: whoever changes one makes every cache in the field miss.

The vectors are checked twice, against production and against SHA-256 written out by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache.sequence import Sequence
from kvtier.keys import (
    chunk_key,
    encode_namespace,
    foreign_key,
    namespace_digest,
    shard_key,
    tail_key,
)
from kvtier.layout import shard_ids
from kvtier.types import Fidelity, GroupKind, KVGroup, KVLayout, Namespace
from tests.golden.make_golden import golden_files

FOLDER = Path(__file__).parent
KEYS = json.loads((FOLDER / "keys.json").read_text())
VECTORS: list[dict[str, Any]] = KEYS["namespaces"]
FOREIGN: list[dict[str, str]] = KEYS["foreign"]


def namespace_of(fields: dict[str, Any]) -> Namespace:
    layout = fields["layout"]
    groups = tuple(
        KVGroup(**{**group, "kind": GroupKind(group["kind"]), "layers": tuple(group["layers"])})
        for group in layout["groups"]
    )
    stage_starts = tuple(layout["stage_starts"])
    cut = KVLayout(**{**layout, "groups": groups, "stage_starts": stage_starts})
    return Namespace(**{**fields, "layout": cut, "fidelity": Fidelity(fields["fidelity"])})


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_b25_production_gives_the_pinned_keys(vector: dict[str, Any]) -> None:
    namespace = namespace_of(vector["namespace"])
    assert encode_namespace(namespace, vector["epoch"]).hex() == vector["encoding"]
    root = namespace_digest(namespace, vector["epoch"])
    assert root.hex() == vector["root"]

    sequence = Sequence(namespace, root)
    sequence.append(vector["tokens"])
    assert [key.hex() for key in sequence.chunk_keys] == vector["chunks"]
    size = namespace.layout.chunk_tokens
    assert chunk_key(root, vector["tokens"][:size]) == sequence.chunk_keys[0]
    assert tail_key(sequence.chunk_keys[-1], vector["tail_tokens"]).hex() == vector["tail"]
    shards = [shard_key(sequence.chunk_keys[0], each) for each in shard_ids(namespace.layout)]
    assert [key.hex() for key in shards] == vector["shards"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_pinned_keys_are_what_the_reference_says(vector: dict[str, Any]) -> None:
    digest = hashlib.sha256(bytes.fromhex(vector["encoding"])).digest()
    assert digest.hex() == vector["root"]
    size = vector["namespace"]["layout"]["chunk_tokens"]
    for index, expected in enumerate(vector["chunks"]):
        tokens = vector["tokens"][index * size : (index + 1) * size]
        digest = hashlib.sha256(digest + struct.pack(f"<{size}i", *tokens)).digest()
        assert digest.hex() == expected
    tail = vector["tail_tokens"]
    hashed = digest + b"tail" + struct.pack("<H", len(tail)) + struct.pack(f"<{len(tail)}i", *tail)
    assert hashlib.sha256(hashed).hexdigest() == vector["tail"]
    for key in vector["shards"]:
        assert key.startswith(vector["chunks"][0])
        assert len(bytes.fromhex(key)) == 38


@pytest.mark.parametrize("vector", FOREIGN, ids=lambda vector: vector["scheme"])
def test_b33_foreign_keys_are_what_production_and_the_reference_say(vector: dict[str, str]) -> None:
    root, key = bytes.fromhex(vector["root"]), bytes.fromhex(vector["key"])
    assert foreign_key(root, vector["scheme"], key).hex() == vector["digest"]
    hashed = b"KVTier foreign key 1"
    for tag, value in enumerate((root, vector["scheme"].encode(), key), 1):
        hashed += struct.pack(">BI", tag, len(value)) + value
    assert hashlib.sha256(hashed).hexdigest() == vector["digest"]


def test_vectors_differ_from_each_other() -> None:
    assert len({vector["root"] for vector in VECTORS}) == len(VECTORS)
    assert len({vector["digest"] for vector in FOREIGN}) == len(FOREIGN)


def test_b25_b26_fresh_processes_agree_whatever_their_hash_seed(tmp_path: Path) -> None:
    expected = golden_files()
    for seed in (None, "0", "123"):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        command = [sys.executable, str(FOLDER / "make_golden.py"), str(folder)]
        subprocess.run(command, env=environment, check=True, timeout=60)
        made = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert made.items() >= expected.items()  # What zstd makes is not pinned byte by byte.


def test_the_files_here_are_those_that_this_version_makes() -> None:
    for name, data in golden_files().items():
        assert (FOLDER / name).read_bytes() == data, name
