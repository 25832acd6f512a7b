"""The rotated codecs keep the block codec contract, within their errors."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.codecs import rotated
from kvtier.codecs.calibration import Calibration, FloatArray, Rotary
from kvtier.interfaces import BlockCodec
from kvtier.testing.codec_contract import BlockCodecContract
from kvtier.types import GroupKind, KVGroup, KVLayout, ShardId, ShardLayout

FLOATS = ("float32", "float16", "bfloat16")


class AnyShape(Calibration):
    """Means for whatever shard is asked for; nothing turns."""

    def __init__(self) -> None:
        group = KVGroup(GroupKind.FULL, (0,), 1, 1, 1, "float32")
        super().__init__(KVLayout((group,)), (np.zeros((1, 1, 1), np.float32),), (Rotary(()),))

    def mean(self, shard: ShardId, layout: ShardLayout) -> FloatArray:
        shape = (layout.layers, layout.kv_heads, layout.k_dim)
        return np.random.default_rng(3).normal(size=shape).astype(np.float32)


class TestInt8(BlockCodecContract):
    # A value's error is about half a step of a row's largest rotated value, 1/127 of it.
    relative_error_max = 0.02
    dtypes = FLOATS

    def make_codec(self) -> BlockCodec:
        return rotated.int8()


class TestInt6(BlockCodecContract):
    relative_error_max = 0.08
    dtypes = FLOATS

    def make_codec(self) -> BlockCodec:
        return rotated.int6()


class TestInt5K4V(BlockCodecContract):
    relative_error_max = 0.3
    dtypes = FLOATS

    def make_codec(self) -> BlockCodec:
        return rotated.int5k4v()


class TestInt5K4VCentred(BlockCodecContract):
    relative_error_max = 0.4
    dtypes = FLOATS

    def make_codec(self) -> BlockCodec:
        return rotated.int5k4v_centred(AnyShape())


class TestInt4(BlockCodecContract):
    relative_error_max = 0.4
    dtypes = FLOATS

    def make_codec(self) -> BlockCodec:
        return rotated.int4(AnyShape())


# Defined only where it can run: a skip for each test of the contract would drown the others.
if torch.cuda.is_available():

    class TestInt8OnCuda(TestInt8):
        device = "cuda"

    class TestInt6OnCuda(TestInt6):
        device = "cuda"

    class TestInt5K4VOnCuda(TestInt5K4V):
        device = "cuda"

    class TestInt5K4VCentredOnCuda(TestInt5K4VCentred):
        device = "cuda"

    class TestInt4OnCuda(TestInt4):
        device = "cuda"
