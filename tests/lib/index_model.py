"""What an index at rest should say, in the plainest way: a tuple of rows, the oldest first."""

from __future__ import annotations

from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.journal import Changes
from kvtier.tiers.disk.rows import Kind, Row, Rows
from kvtier.types import ShardId

State = tuple[Row, ...]

KINDS = tuple(
    Kind(bytes([n]) * 32, codec, tuple((ShardId(g, 0, 0), 4096 * (g + n + 1)) for g in range(n)))
    for n, codec in ((1, "raw"), (2, "raw"), (3, "other"))
)


def make_row(
    name: object,
    parent: object = None,
    *,
    generation: int = 1,
    used_ms: int = 0,
    kind: Kind = KINDS[0],
    position: int = 0,
) -> Row:
    above = None if parent is None else chunk_key(parent)
    return Row(chunk_key(name), above, position, kind, generation, used_ms)


def state_of(rows: Rows | None) -> State | None:
    return None if rows is None else tuple(rows.row(i) for i in range(len(rows)))


def after(state: State, changes: Changes) -> State:
    """Apply changes one by one."""
    rows = {row.key: row for row in state}
    for row in changes.added:
        rows.pop(row.key, None)
        rows[row.key] = row
    for key, generation in changes.removed:
        if key in rows and rows[key].generation == generation:
            del rows[key]
    for key in changes.used:
        if key in rows:
            rows[key] = rows.pop(key)._replace(used_ms=changes.used_ms)
    return tuple(rows.values())
