"""LMCache's keys as foreign keys, and the seal that tells of what layout a payload is. Pure.

::

    payload   bytes of the object ............ | seal, 32 bytes
    seal      "KVTL" | version u32 | bytes of the object u64 | digest of its layout, 16 bytes

LMCache's keys say neither dtype nor shape, so half precision and bfloat16 of one model have the
same keys and sizes. The seal parts them.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kvtier.errors import ConfigError

_SEAL: Final = struct.Struct("<4sIQ16s")
_MAGIC: Final = b"KVTL"
_VERSION: Final = 1
SEAL_BYTES: Final = _SEAL.size

_TENSOR: Final = re.compile(r"(\w+)\[(\d+(?:,\d+)*)\]")
_DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

#: Whose keys the L2 adapter keeps, and in which form.
L2_SCHEME: Final = "l2 objects 1"
CONNECTOR_SCHEME: Final = "engine chunks 1"
SYSTEM: Final = "lmcache"


class ObjectKey(Protocol):
    """What LMCache's server calls one object. Its model and salt hold no ``@``."""

    @property
    def chunk_hash(self) -> bytes:
        """Of the chunk's tokens and all before them."""
        ...

    @property
    def model_name(self) -> str:
        """As the engine calls it."""
        ...

    @property
    def kv_rank(self) -> int:
        """Which rank's share, of how many."""
        ...

    @property
    def object_group_id(self) -> int:
        """Which group of layers."""
        ...

    @property
    def cache_salt(self) -> str:
        """Whose; empty for nobody's."""
        ...


def object_name(key: ObjectKey) -> bytes:
    """Return the foreign key of an object: every field, told apart."""
    where = f"{key.kv_rank:#x}@{key.object_group_id:x}@{key.model_name}@{key.cache_salt}"
    return f"{where}@{key.chunk_hash.hex()}".encode()


def layout_text(shapes: Iterable[Sequence[int]], dtypes: Iterable[object]) -> str:
    """Return what tells one layout from another: ``bfloat16[2,32,256,1024]``, one per tensor."""
    return ";".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def layout_bytes(layout: str) -> int:
    """Return the bytes of an object of a layout. Raises ``ConfigError`` for what is none."""
    total = 0
    for tensor in layout.split(";"):
        match = _TENSOR.fullmatch(tensor)
        size = _DTYPE_BYTES.get(match[1], 0) if match else 0
        if match is None or not size:
            raise ConfigError(
                f"layout {layout!r}: allowed is a dtype of {', '.join(sorted(_DTYPE_BYTES))} with "
                "its shape, as in 'bfloat16[2,32,256,1024]', several joined by ';'"
            )
        total += size * math.prod(map(int, match[2].split(",")))
    return total


def seal(nbytes: int, layout: str) -> bytes:
    """Return the seal of an object of so many bytes."""
    digest = hashlib.blake2b(layout.encode(), digest_size=16).digest()
    return _SEAL.pack(_MAGIC, _VERSION, nbytes, digest)


def sealed_bytes(found: bytes | bytearray, layout: str) -> int | None:
    """Return the object's bytes that a seal tells; None: it is not that of this layout."""
    if len(found) != SEAL_BYTES or found[:4] != _MAGIC:
        return None
    nbytes: int = _SEAL.unpack(found)[2]
    return nbytes if found == seal(nbytes, layout) else None
