"""Which way each codec's bytes cross the link, with the figures that decided.

GB/s of bfloat16 on one H200 whose link copies 55 GB/s either way, 32,768 tokens of 32 layers and
8 heads of 128 in scattered pages of 16 (bench/kernels/pack.py, unpack.py; programs in brackets):

========= ============= ============= ============= =============
codec     pack direct   pack staged   unpack direct unpack staged
========= ============= ============= ============= =============
raw       48 (16)       50 (32)       47 (16)       49 (many)
int8      88 (many)     86 (32)       86 (32)       88 (many)
fp8       not measured  not measured  86 (64)       57 (32)
int5k4v   91 (many)     not measured  129 (many)    105 (32)
int4      102 (many)    82 (many)     132 (many)    110 (many)
========= ============= ============= ============= =============

The 4- and 5-bit codes are bound by their arithmetic, not by the link: packing ``int4`` runs at 129
GB/s within the device, and at 15 with 16 programs. So they may have all programs; a matrix product
beside them took no measurably longer (1.48 ms against 1.42 to 1.56).
"""

from __future__ import annotations

from typing import Final

from kvtier_kernels.transfer.lane import Way

_MANY: Final = 1 << 30

_PACK: Final = Way(direct=False, programs=32)
_UNPACK: Final = Way(direct=True, programs=32, rows=128, warps=8, stages=1)

_WAYS: Final[dict[tuple[str, bool], Way]] = {
    ("int4", True): Way(direct=True, programs=_MANY, rows=64, warps=8, stages=1),
    ("int5k4v-c", True): Way(direct=True, programs=_MANY, rows=64, warps=8, stages=1),
    ("int5k4v", True): Way(direct=True, programs=_MANY),
    ("raw", False): Way(direct=False, programs=32),
    ("fp8", False): Way(direct=True, programs=64, rows=64, warps=8, stages=1),
    ("int4", False): Way(direct=True, programs=_MANY),
    ("int5k4v-c", False): Way(direct=True, programs=_MANY, rows=64, warps=8, stages=1),
    ("int5k4v", False): Way(direct=True, programs=_MANY, rows=64, warps=8, stages=1),
}


def way_of(codec: str, *, packs: bool) -> Way:
    """The way of a codec, named as in headers, from the pool (``packs``) or into it."""
    return _WAYS.get((codec.partition(".")[0], packs), _PACK if packs else _UNPACK)
