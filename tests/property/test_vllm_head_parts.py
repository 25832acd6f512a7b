"""vLLM's blocks and head groups with any number of heads, tokens and ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cache.planner import chunk_shape, shard_writers
from kvtier.codecs.raw import RawCodec
from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import validate_layout
from kvtier_adapters.vllm.cpu_blocks import split_block, transposes_keys
from kvtier_adapters.vllm.geometry import Geometry
from kvtier_adapters.vllm.head_groups import stored_head_groups
from tests.lib.vllm_double import double_geometry

SMALL = st.integers(1, 9)


def storable(served: Geometry, asked: int, *, stores: bool) -> bool:
    """Tell whether the planner can cut and store so many parts."""
    layout = served.layout(8, asked)
    try:
        validate_layout(layout)
        shape = chunk_shape(layout, RawCodec())
        return not stores or shard_writers(layout, shape, served.placements()).keys() == set(
            shape.layouts
        )
    except LayoutError:
        return False


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 5, 6, 7, 12])
def test_any_heads_degree_and_parts_are_allowed_if_the_planner_can(
    heads: int, stores: bool
) -> None:
    degrees = [degree for degree in range(1, 15) if not (heads % degree and degree % heads)]
    for degree, asked in itertools.product(degrees, range(1, 25)):
        served = replace(double_geometry(degree, 4, 8, heads), opaque=False)
        try:
            allowed = stored_head_groups(served, asked, stores=stores) == asked
        except ConfigError:
            allowed = False
        assert allowed == storable(served, asked, stores=stores), (degree, asked)


@given(blocks=SMALL, heads=SMALL, tokens=SMALL, dim=SMALL)
def test_k_and_v_of_a_block_cover_it_and_share_nothing(
    blocks: int, heads: int, tokens: int, dim: int
) -> None:
    layer = torch.zeros(blocks, heads, tokens, 2 * dim, dtype=torch.int32)
    keys, values = split_block(layer, dim)
    count = blocks * heads * tokens * dim
    places = torch.arange(2 * count, dtype=torch.int32)
    keys.copy_(places[:count].view(keys.shape))
    values.copy_(places[count:].view(values.shape))
    assert torch.equal(layer.flatten().sort().values, places)
    whole = layer.view(blocks, heads, 2 * tokens * dim)
    half = tokens * dim
    assert torch.equal(whole[:, :, :half], keys.permute(0, 2, 3, 1).flatten(2))
    assert torch.equal(whole[:, :, half:], values.permute(0, 2, 1, 3).flatten(2))


@settings(max_examples=20)
@given(
    heads=st.integers(1, 5),
    tokens=st.integers(2, 12),
    dim=st.integers(2, 12),
    at=st.integers(0, 10_000),
)
def test_a_writer_that_swaps_two_places_is_not_one_that_is_known(
    heads: int, tokens: int, dim: int, at: int
) -> None:
    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        views = split_block(cache, dim)
        for view, rows in zip(views, (keys, values), strict=True):
            view[slots // tokens, slots % tokens] = rows

    def swaps(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        write(keys, values, cache, slots)
        whole = cache[1].view(-1)  # A block that is written whole.
        one, other = at % len(whole), (at + 1) % len(whole)
        whole[[one, other]] = whole[[other, one]].clone()

    assert transposes_keys(write, torch.float32, tokens, heads, dim)
    assert not transposes_keys(swaps, torch.float32, tokens, heads, dim)
