"""The lossless codec keeps the block codec contract, byte for byte."""

from __future__ import annotations

import torch

from kvtier.codecs.lossless import LosslessCodec
from kvtier.interfaces import BlockCodec
from kvtier.testing.codec_contract import BlockCodecContract, Shape
from kvtier.testing.pools import Arrangement, TorchPool


class TestLosslessCodec(BlockCodecContract):
    def make_codec(self) -> BlockCodec:
        return LosslessCodec()

    def filled_pool(self, shape: Shape, arrangement: Arrangement, seed: int = 1) -> TorchPool:
        """Values where exponents are packed: no codec has room for any bytes in fewer."""
        if shape.layout.dtype != "bfloat16":
            return super().filled_pool(shape, arrangement, seed)
        pool = shape.pool(arrangement, device=self.device)
        pool.fill_values(seed)
        return pool


# Defined only where it can run: a skip for each test of the contract would drown the others.
if torch.cuda.is_available():

    class TestLosslessCodecOnCuda(TestLosslessCodec):
        device = "cuda"
