"""A large shard is read with its first section alone, a small one in one go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.planner import chunk_shape
from kvtier.codecs.raw import RawCodec
from kvtier.constants import READ_FIRST_BYTES
from kvtier.testing.fault_files import FileOperation
from kvtier.types import GroupKind, KVGroup, KVLayout
from tests.lib.cache_setup import CacheSetup, cache_setup, settle, written

CHUNK = 64


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as made:
        yield made


def layout_of(layers: int) -> KVLayout:
    """A section is a quarter of a mebibyte and one layer."""
    group = KVGroup(GroupKind.FULL, tuple(range(layers)), 4, 128, 128, "float32")
    return KVLayout((group,), chunk_tokens=CHUNK, section_layers=1)


@pytest.mark.parametrize("layers", [15, 16])
def test_the_first_section_of_a_large_shard_comes_alone(setup: CacheSetup, layers: int) -> None:
    layout = layout_of(layers)
    large = chunk_shape(layout, RawCodec()).chunk_bytes >= READ_FIRST_BYTES
    assert large == (layers == 16)
    engine = setup.open(layout, dram_chunks=2)
    engine.store(engine.sequence(range(CHUNK)))
    written(engine)
    setup.close(engine)
    engine = setup.open(layout, dram_chunks=2)
    match = engine.match(engine.sequence(range(CHUNK)))
    before = setup.files.count(FileOperation.READ)
    engine.load(match)
    settle(engine)
    assert setup.files.count(FileOperation.READ) - before == (2 if large else 1)
