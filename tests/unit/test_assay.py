"""Layers that a calibrated codec does worse on than it should are found in what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvtier.cache.planner import chunk_shape, shard_writers, store_moves
from kvtier.codecs.assay import Assay
from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.raw import RawCodec
from kvtier.testing.pools import TorchPool
from kvtier.types import Blocks, GroupKind, KVGroup, KVLayout, Move, Part, Placement, Slot
from kvtier_kernels.rotated import reference

DIM, CHUNK, BLOCK, CHUNKS = 64, 32, 8, 4
GROUP = KVGroup(GroupKind.FULL, (0, 2, 5), kv_heads=2, k_dim=DIM, v_dim=DIM, dtype="float32")
LAYOUT = KVLayout((GROUP,), chunk_tokens=CHUNK, section_layers=2)
ROTARY = Rotary(tuple(10000.0 ** (-i / 32) for i in range(32)))
COUNT = CHUNKS * CHUNK // BLOCK


def spiky(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Rows that are one value and little else once they are rotated."""
    rows = torch.randn((int(np.prod(shape[:-1])), DIM), generator=generator) * 0.3
    places = torch.randint(DIM, (len(rows),), generator=generator)
    rows[torch.arange(len(rows)), places] += 8.0
    return reference.unrotate(rows.t().contiguous()).t().reshape(tuple(shape))


@dataclass
class Flow:
    """A pool of Gaussian KV over a mean of K, and its stores."""

    pool: TorchPool
    mean: np.ndarray[tuple[int, ...], np.dtype[np.float32]]

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for chunk in range(CHUNKS):
            shape = chunk_shape(LAYOUT, RawCodec(), chunk=chunk)
            found += store_moves(
                LAYOUT,
                shape,
                shard_writers(LAYOUT, shape, (Placement(),)),
                chunk=chunk,
                blocks=Blocks(0, (tuple(range(COUNT)),), BLOCK),
                slots=lambda _: Slot(0, 0),
            )
        return found


@pytest.fixture
def flow() -> Flow:
    generator = torch.Generator().manual_seed(5)
    pool = TorchPool([GROUP], block_count=COUNT, block_tokens=BLOCK)
    mean = np.random.default_rng(5).normal(0, 4, (3, 2, DIM)).astype(np.float32)
    cosine, sine = ROTARY.turns(0, CHUNKS * CHUNK, DIM)
    for layer in range(3):
        turned = mean[layer][:, None] * cosine + ROTARY.partner(mean[layer])[:, None] * sine
        for part in Part:
            view = pool.layer_view(0, layer, part)
            values = torch.randn(view.shape, generator=generator)
            if part is Part.K:
                rows = torch.from_numpy(turned).permute(1, 0, 2)
                values += rows.reshape(COUNT, BLOCK, 2, DIM).to(values)
            view.copy_(values)
    return Flow(pool, mean)


def assayed(flow: Flow, tokens: int = 64) -> tuple[int, ...] | None:
    assay = Assay(Calibration(LAYOUT, (flow.mean,), (ROTARY,)), tokens=tokens)
    for move in flow.moves():
        assay.observe(flow.pool, move)
    return assay.weak_layers


def test_gaussian_layers_do_as_they_should(flow: Flow) -> None:
    assert assayed(flow) == ()


def test_without_its_mean_k_would_lose_much_more_of_what_counts(flow: Flow) -> None:
    """The means are turned as K is: with others the rest is no Gaussian rest."""
    calibrator = Calibrator(LAYOUT, [ROTARY], tokens=100)
    for move in flow.moves():
        calibrator.observe(flow.pool, move)
    found = calibrator.result()
    assert found is not None
    np.testing.assert_allclose(found.means[0], flow.mean, atol=0.5)


@pytest.mark.parametrize("part", list(Part))
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_breaks_gaussianity_is_found(flow: Flow, part: Part, layer: int) -> None:
    view = flow.pool.layer_view(0, layer, part)
    view.copy_(spiky(view.shape, torch.Generator().manual_seed(6)))
    if part is Part.K:
        flow.mean[layer] = 0.0
    assert assayed(flow) == (GROUP.layers[layer],), "the model's number of the layer"


def test_it_waits_for_every_layer(flow: Flow) -> None:
    assert assayed(flow, tokens=CHUNKS * CHUNK - 3) is None, "four are sinks"
    assert assayed(flow, tokens=CHUNKS * CHUNK - 4) == ()


def test_what_no_codec_stores_is_left_out(flow: Flow) -> None:
    flow.pool.layer_view(0, 1, Part.V)[0, 5, 0, 0] = float("nan")
    assert assayed(flow, tokens=CHUNKS * CHUNK - 4) is None
    assert assayed(flow) == ()


def test_the_mean_is_taken_away_first(flow: Flow) -> None:
    """A mean that is one value once rotated would hide the rest; the rest is Gaussian."""
    still = Rotary((0.0,) * 32)
    spike = torch.zeros(DIM, 1)
    spike[7] = 50.0
    mean = reference.unrotate(spike).reshape(DIM)
    for layer in range(3):
        view = flow.pool.layer_view(0, layer, Part.K)
        generator = torch.Generator().manual_seed(layer)
        view.copy_(torch.randn(view.shape, generator=generator) + mean)
    for share, weak in ((1.0, ()), (0.0, GROUP.layers)):
        means = np.broadcast_to(share * mean.numpy(), (3, 2, DIM)).astype(np.float32)
        assay = Assay(Calibration(LAYOUT, (means,), (still,)), tokens=64)
        for move in flow.moves():
            assay.observe(flow.pool, move)
        assert assay.weak_layers == weak
