"""Which way each codec's bytes cross the link, with the figures that decided."""

from __future__ import annotations

from typing import Final

from kvtier_kernels.transfer.lane import Way

#: A kernel's own stores to the host are small where rows are short, and waste the link: 95 to 115
#: GB/s of bfloat16 for 4-bit codes on an H200, against 207 for packing in HBM and one copy.
_STORE: Final = Way(direct=False, programs=32)
#: Its loads are not: 193 GB/s, with 51.2 GB/s on the link.
_LOAD: Final = Way(direct=True, programs=32)

_WAYS: Final[dict[tuple[str, bool], Way]] = {
    # Bytes that stay what they are: the copy engine's 55 GB/s against 51 to 53 of a kernel.
    ("raw", False): Way(direct=False, programs=32),
}


def way_of(codec: str, *, packs: bool) -> Way:
    """The way of a codec, named as in headers, from the pool (``packs``) or into it."""
    return _WAYS.get((codec.partition(".")[0], packs), _STORE if packs else _LOAD)
