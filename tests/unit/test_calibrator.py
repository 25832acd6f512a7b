"""What a calibrator counts, when it is done, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.codecs.calibration import Rotary
from kvtier.codecs.calibrator import Calibrator
from kvtier.errors import ConfigError, LayoutError
from kvtier.testing.pools import TorchPool
from kvtier.types import Part
from tests.lib.calibration_traffic import SINKS, Traffic, traffic

PLAIN = Rotary((1.0, 0.5, 0.25, 0.125))
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def learn(flow: Traffic, chunks: range, tokens: int) -> Calibrator:
    learner = Calibrator(flow.layout, [PLAIN], tokens=tokens)
    for chunk in chunks:
        for pool, move in flow.moves(chunk):
            learner.observe(pool, move)
    return learner


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_done_after_so_many_tokens_and_then_never_changes(device: str) -> None:
    flow = traffic(chunks=8, device=device)
    learner = learn(flow, range(4), tokens=3 * 4)
    # Of the first chunk's four tokens none counts.
    assert learner.tokens_seen == 12
    found = learner.result()
    assert found is not None
    for pool, move in flow.moves(6):
        learner.observe(pool, move)
    assert learner.tokens_seen == 12
    assert learner.result() is found
    np.testing.assert_allclose(found.means[0], flow.mean_k(PLAIN, 16), rtol=1e-6)
    assert learn(flow, range(3), tokens=12).result() is None


def test_the_first_tokens_of_a_sequence_are_left_out() -> None:
    flow = traffic(chunk_tokens=6, chunks=2)
    for _, pool in flow.ranks:
        for layer in range(3):
            # Blocks lie in reverse: the last two hold the sinks.
            pool.layer_view(0, layer, Part.K)[-SINKS // 2 :] = 1e6
    found = learn(flow, range(2), tokens=8).result()
    assert found is not None
    np.testing.assert_allclose(found.means[0], flow.mean_k(PLAIN, 12), rtol=1e-6)


def test_means_wait_for_all_heads_and_layers() -> None:
    flow = traffic(tp_size=2, stages=2, chunks=3)
    learner = Calibrator(flow.layout, [PLAIN], tokens=8)
    waiting = [each for chunk in (1, 2) for each in flow.moves(chunk)]
    last = waiting.pop()
    for pool, move in waiting:
        learner.observe(pool, move)
    assert learner.tokens_seen == 4
    assert learner.result() is None
    learner.observe(*last)
    assert learner.result() is not None


class Interrupted:
    """A pool that does something else the first time that it is looked at."""

    def __init__(self, pool: TorchPool, otherwise: Callable[[], None]) -> None:
        self._pool = pool
        self._otherwise: Callable[[], None] | None = otherwise
        self.block_tokens = pool.block_tokens
        self.block_count = pool.block_count
        self.stream = pool.stream

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        otherwise, self._otherwise = self._otherwise, None
        if otherwise is not None:
            otherwise()
        return self._pool.layer_view(group, layer, part)


def test_a_move_that_ends_after_the_last_one_changes_nothing() -> None:
    flow = traffic(chunks=4)
    learner = learn(flow, range(1, 2), tokens=8)
    ((pool, late),), ((_, last),) = flow.moves(2), flow.moves(3)
    found = []

    def finish() -> None:
        learner.observe(pool, last)
        found.append(learner.result())

    learner.observe(Interrupted(pool, finish), late)
    assert found[0] is not None
    assert learner.result() is found[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kv_that_no_codec_stores_is_left_out(value: float) -> None:
    flow = traffic(chunks=4)
    pool = flow.ranks[0][1]
    pool.layer_view(0, 1, Part.K)[0, 0, 1, 5] = value  # of the last chunk
    learner = learn(flow, range(1, 4), tokens=9)
    assert learner.tokens_seen == 8
    assert learner.result() is None


def test_what_does_not_fit_is_refused() -> None:
    flow = traffic()
    with pytest.raises(ConfigError, match="rotary"):
        Calibrator(flow.layout, [])
    ((pool, move),) = flow.moves(1)
    learner = Calibrator(traffic(kv_heads=1).layout, [PLAIN])
    with pytest.raises(LayoutError, match="calibrated"):
        learner.observe(pool, move)
    with pytest.raises(LayoutError, match="group 1"):
        learner.observe(pool, replace(move, shard=move.shard._replace(group=1)))
    learner = Calibrator(flow.layout, [PLAIN])
    with pytest.raises(LayoutError):
        learner.observe(traffic(dtype="bfloat16").ranks[0][1], move)
