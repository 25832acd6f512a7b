"""The raw codec keeps the block codec contract, byte for byte."""

from __future__ import annotations

import torch

from kvtier.codecs.raw import RawCodec
from kvtier.interfaces import BlockCodec
from kvtier.testing.codec_contract import BlockCodecContract


class TestRawCodec(BlockCodecContract):
    def make_codec(self) -> BlockCodec:
        return RawCodec()


# Defined only where it can run: a skip for each test of the contract would drown the others.
if torch.cuda.is_available():

    class TestRawCodecOnCuda(TestRawCodec):
        device = "cuda"
