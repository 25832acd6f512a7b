"""The folder that LMCache's ``fs`` and ``fs_native`` adapters write, as something to read. Pure.

::

    MODEL@0xRANK@GROUP@HASH.data          raw bytes of one object, no header, no checksum
    MODEL@0xRANK@GROUP@HASH@SALT.data     with ``/`` in MODEL as ``-SEP-``

As ``fs_l2_adapter.py`` of LMCache 0.5.6 writes it. Numbers are hexadecimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_END: Final = ".data"
_SLASH: Final = "-SEP-"


@dataclass(frozen=True, slots=True)
class FileKey:
    """The key of an object that a file's name tells; an ``ObjectKey``."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str = ""


def file_key(name: str) -> FileKey | None:
    """Return the key that a file's name tells; None: it is no object of LMCache's."""
    if not name.endswith(_END):
        return None
    fields = name.removesuffix(_END).split("@")
    if len(fields) not in {4, 5} or not all(fields):
        return None
    model, rank, group, chunk_hash = fields[:4]
    try:
        return FileKey(
            bytes.fromhex(chunk_hash),
            model.replace(_SLASH, "/"),
            int(rank, 16),
            int(group, 16),
            fields[4] if len(fields) == 5 else "",
        )
    except ValueError:
        return None
