"""Whose chunks a directory holds: small, replaced whole, and ignored when damaged.

Losing it loses no chunk and brings none back: what lies there counts for nobody until its
namespace is used again, and what is stale leaves as what is cold does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgpack  # type: ignore[import-untyped]
import xxhash

from kvtier.constants import DIGEST_BYTES, ROOTS_MAX

_NAME = "roots"
_SUM_BYTES = 16
#: Digests of namespace and tenant (empty: none), the namespace's epoch, the tenant's.
StoredRoot = tuple[bytes, bytes, int, int]


def load_roots(folder: str) -> dict[bytes, StoredRoot]:
    """Return what the file says. Raises ``OSError`` when it cannot be read."""
    try:
        with open(os.path.join(folder, _NAME), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return {}
    body = data[_SUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_SUM_BYTES]:
        return {}
    rows = msgpack.unpackb(body, strict_map_key=False)
    return {root: (base, tenant, one, two) for root, (base, tenant, one, two) in rows.items()}


def save_roots(folder: str, rows: Mapping[bytes, StoredRoot]) -> None:
    """Replace the file. Raises ``OSError``."""
    assert len(rows) <= ROOTS_MAX, "more roots than are kept"
    assert all(len(root) == DIGEST_BYTES for root in rows), "a root is a digest"
    body = msgpack.packb({root: tuple(row) for root, row in rows.items()})
    path = os.path.join(folder, _NAME)
    with open(path + ".new", "wb") as file:
        file.write(xxhash.xxh3_128_digest(body) + body)
    os.replace(path + ".new", path)
