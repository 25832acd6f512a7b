"""What an engine of one tensor-parallel degree has stored is loaded by engines of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import MIB
from kvtier.types import Namespace, Placement
from kvtier_adapters.vllm.scheduler_side import Duties
from tests.lib.vllm_double import VllmDouble, double_geometry
from tests.lib.vllm_double_parts import DoubleRequest

CHUNK_TOKENS = 8
DEGREES = (1, 2, 4)


@contextmanager
def engine(disk: Path, *, heads: int, stored: int, ranks: int) -> Iterator[VllmDouble]:
    """A double of vLLM on so many ranks, with a cache of its own on a disk that others had."""
    config = CacheConfig(
        dram_bytes=MIB,
        slab_bytes=MIB // 8,
        disk=DiskConfig(str(disk), capacity_bytes=MIB),
        workers=tuple(Placement(rank, rank, ranks) for rank in range(ranks)),
        load_deadline_s=2.0,
    )
    layout = double_geometry(ranks, 4, 64, heads).layout(CHUNK_TOKENS, stored)
    duties = Duties(4, 4, 2.0, ranks=ranks, stores=ranks in writers(heads, stored))
    cache = Cache(config)
    namespace = Namespace("a double", layout)
    double = VllmDouble(cache, namespace, ranks=ranks, heads=heads, duties=duties)
    try:
        yield double
    finally:
        double.close()
        cache.close()


def answer(double: VllmDouble, name: str, prompt: list[int]) -> DoubleRequest:
    request = double.add(DoubleRequest(name, prompt, max_tokens=3))
    double.run()
    assert request in double.done
    return request


def writers(heads: int, stored: int) -> list[int]:
    """The degrees whose ranks hold whole parts of what is stored."""
    return [each for each in DEGREES if min(stored, heads) % min(each, heads) == 0]


@pytest.mark.parametrize(
    ("heads", "stored", "writer"),
    [
        (heads, stored, writer)
        for heads in (1, 2, 4)
        for stored in (1, 2, 4, 8)
        for writer in writers(heads, stored)
    ],
)
def test_every_degree_reads_what_another_has_stored(
    heads: int, stored: int, writer: int, rng: random.Random, tmp_path: Path
) -> None:
    """The double looks at each head of each rank at each token, so every byte is seen."""
    prompt = [rng.randrange(1000) for _ in range(40)]
    with engine(tmp_path, heads=heads, stored=stored, ranks=writer) as first:
        told = answer(first, "first", prompt).all_token_ids
    for reader in DEGREES:
        with engine(tmp_path, heads=heads, stored=stored, ranks=reader) as second:
            request = answer(second, "second", prompt)
            assert request.loaded == 36
            assert request.all_token_ids == told
            assert second.side.faults == 0


def test_what_is_stored_in_other_parts_is_kept_apart(rng: random.Random, tmp_path: Path) -> None:
    prompt = [rng.randrange(1000) for _ in range(40)]
    with engine(tmp_path, heads=4, stored=1, ranks=1) as first:
        answer(first, "first", prompt)
    with engine(tmp_path, heads=4, stored=2, ranks=1) as second:
        assert answer(second, "second", prompt).loaded == 0
