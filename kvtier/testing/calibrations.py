"""Calibrations that no model has, for tests and benches of centred codecs."""

from __future__ import annotations

import numpy as np

from kvtier.codecs.calibration import Calibration, Rotary
from kvtier.types import GroupKind, KVGroup, KVLayout, ShardLayout


def made_up_calibration(layout: ShardLayout, seed: int = 1) -> Calibration:
    """Normally distributed means for a model of just the shard's layers and heads."""
    layers = tuple(range(layout.layers))
    group = KVGroup(
        GroupKind.FULL if layout.v_dim else GroupKind.LATENT,
        layers,
        layout.kv_heads,
        layout.k_dim,
        layout.v_dim,
        layout.dtype,
    )
    shape = (layout.layers, layout.kv_heads, layout.k_dim)
    means = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    pairs = layout.k_dim // 2
    rotary = Rotary(tuple(10000.0 ** (-pair / max(1, pairs)) for pair in range(pairs)))
    return Calibration(KVLayout((group,), 256), (means,), (rotary,))
