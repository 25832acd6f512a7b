"""The codec int4-g128 keeps the block codec contract, within half a step of its codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtier.codecs.grouped import GroupedInt4Codec
from kvtier.errors import CodecError
from kvtier.interfaces import BlockCodec
from kvtier.testing.codec_contract import PLAIN, BlockCodecContract


class TestGroupedInt4Codec(BlockCodecContract):
    # Half a step of 1 / 7, and what the scale and the pool's dtype lose.
    relative_error_max = 0.078
    dtypes = ("float32", "bfloat16", "float16")

    def make_codec(self) -> BlockCodec:
        return GroupedInt4Codec()

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8"])
    def test_b144_what_is_quantised_is_not_quantised_again(self, dtype: str) -> None:
        with pytest.raises(CodecError, match="quantised already"):
            self.make_codec().section_bytes(replace(PLAIN.layout, dtype=dtype), 0)


# Defined only where it can run: a skip for each test of the contract would drown the others.
if torch.cuda.is_available():

    class TestGroupedInt4CodecOnCuda(TestGroupedInt4Codec):
        device = "cuda"
