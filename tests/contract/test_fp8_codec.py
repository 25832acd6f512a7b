"""The fp8 codec keeps the block codec contract, within half a step of its codes."""

from __future__ import annotations

import torch

from kvtier.codecs.fp8 import Fp8Codec
from kvtier.interfaces import BlockCodec
from kvtier.testing.codec_contract import BlockCodecContract


class TestFp8Codec(BlockCodecContract):
    # Half of the widest step over the largest code, 16 / 448, and what the scale loses.
    relative_error_max = 0.04

    def make_codec(self) -> BlockCodec:
        return Fp8Codec()


# Defined only where it can run: a skip for each test of the contract would drown the others.
if torch.cuda.is_available():

    class TestFp8CodecOnCuda(TestFp8Codec):
        device = "cuda"
