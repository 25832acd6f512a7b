"""In which order chunks can do without a tier, so that none is cut off from its parent."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.types import ChunkKey, Entry


def coldest_first(entries: Sequence[Entry], used: Sequence[float]) -> list[ChunkKey]:
    """Return the keys of entries, the one used longest ago first, children before their parents.

    ``used`` says of each entry when it was used, in any unit. A parent counts as used when the
    latest of its descendants among the entries was.
    """
    latest = {entry.key: when for entry, when in zip(entries, used, strict=True)}
    deepest_first = sorted(entries, key=lambda entry: -entry.position)
    for entry in deepest_first:
        if entry.parent in latest:
            latest[entry.parent] = max(latest[entry.parent], latest[entry.key])
    return [entry.key for entry in sorted(deepest_first, key=lambda entry: latest[entry.key])]
