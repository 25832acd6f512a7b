"""Which way each codec's bytes cross the link, with the figures that decided.

GB/s of bfloat16 on one H200 whose link copies 55 GB/s either way, 32,768 tokens of 32 layers and
8 heads of 128 in scattered pages of 16 (bench/kernels/pack.py, unpack.py; programs in brackets):

========= ============= ============= ============= =============
codec     pack direct   pack staged   unpack direct unpack staged
========= ============= ============= ============= =============
raw       49 (16)       52 (16)       47 (16)       51 (16)
int8      97 (64)       98 (32)       92 (64)       94 (64)
fp8       91 (32)       95 (32)       90 (32)       95 (32)
int5k4v   150 (64)      155 (64)      152 (64)      148 (64)
int4      167 (many)    158 (many)    169 (many)    162 (many)
========= ============= ============= ============= =============

Staged ways leave the link to the copy engine: a bfloat16 matrix product beside them took 0 to 5 %
longer, and 1.5 to 4 times as long beside kernels that read or write the host's memory themselves.
What is missing to the link (205 for int4): of the 26 ms of a batch the first copy begins after 1.3,
for 3.7 the host lays slices out no faster than the link takes them, and after that copies of 9 MB
cross at 44 to 50 GB/s beside the kernels (those of int8, 18 MB, at 54).
"""

from __future__ import annotations

from typing import Final

from kvtier_kernels.transfer.lane import Way

_MANY: Final = 1 << 30

_STAGED: Final = Way(direct=False, programs=32)
_WIDE: Final = Way(direct=False, programs=32, rows=128, warps=8, stages=1)
_MORE: Final = Way(direct=False, programs=64)
_ALL: Final = Way(direct=False, programs=_MANY)

_WAYS: Final[dict[tuple[str, bool], Way]] = {
    ("raw", True): Way(direct=False, programs=16),
    ("raw", False): Way(direct=False, programs=16),
    ("int8", False): _MORE,
    ("fp8", True): _WIDE,
    ("fp8", False): _WIDE,
    ("lossless", True): _ALL,
    ("lossless", False): _ALL,
    ("int5k4v", True): _MORE,
    ("int5k4v", False): _MORE,
    ("int5k4v-c", True): _ALL,
    ("int5k4v-c", False): _ALL,
    ("int4", True): _ALL,
    ("int4", False): _ALL,
}


def way_of(codec: str, *, packs: bool) -> Way:
    """The way of a codec, named as in headers, from the pool (``packs``) or into it."""
    return _WAYS.get((codec.partition(".")[0], packs), _STAGED)
