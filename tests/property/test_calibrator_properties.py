"""A calibration is the mean of K before RoPE, however chunks are cut and whenever they come."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs.calibration import Rotary
from kvtier.codecs.calibrator import Calibrator
from tests.lib.calibration_traffic import SINKS, traffic

ROTARIES = [
    Rotary((1.0, 0.5, 0.25, 0.125)),
    Rotary((1.0, 0.3), interleaved=True, scaling=1.25),
    Rotary((0.7,), start=3, scaling=0.5),
]


@given(data=st.data())
def test_running_means_equal_those_of_two_passes(data: st.DataObject) -> None:
    draw = data.draw
    tp_size = draw(st.sampled_from([1, 2, 4]))
    flow = traffic(
        kv_heads=draw(st.sampled_from([2, 4])),
        chunk_tokens=draw(st.sampled_from([2, 4, 6])),
        chunks=draw(st.integers(4, 8)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        tp_size=tp_size,
        stages=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**16)),
    )
    rotary = draw(st.sampled_from(ROTARIES))
    tokens = flow.chunks * flow.layout.chunk_tokens
    learner = Calibrator(flow.layout, [rotary], tokens=tokens - SINKS)
    moves = [each for chunk in range(flow.chunks) for each in flow.moves(chunk)]
    for pool, move in draw(st.permutations(moves)):
        learner.observe(pool, move)
    found = learner.result()
    assert found is not None
    expected = flow.mean_k(rotary, tokens)
    np.testing.assert_allclose(found.means[0], expected, rtol=2e-6, atol=2e-6)
    assert found.rotaries == (rotary,)
