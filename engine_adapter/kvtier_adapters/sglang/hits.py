"""How far a prompt is there when several pools have to have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"


@dataclass(frozen=True, slots=True)
class PoolFound:
    """Which pages of the KV's prefix a pool holds, and what SGLang's policy wants of it.

    ``trailing``: how many pages before the end of a prefix must be there.
    """

    policy: str
    held: Sequence[bool]
    trailing: int = 1


def restorable(kv_pages: int, pools: Mapping[str, PoolFound]) -> tuple[list[int], dict[str, int]]:
    """Return the lengths of prefixes that can be restored, and how far each pool goes.

    Lengths are in pages and ascend. A pool with a policy of another kind has no say, and no
    figure.
    """
    lengths = set(range(1, kv_pages + 1))
    reach: dict[str, int] = {}
    for name, found in pools.items():
        if found.policy == ALL_PAGES:
            own = set(range(1, _run(found.held[:kv_pages]) + 1))
        elif found.policy == TRAILING_PAGES:
            own = _ends(found.held[:kv_pages], max(1, found.trailing))
        else:
            continue
        reach[name] = max(own, default=0)
        lengths &= own
    return sorted(lengths), reach


def _run(held: Sequence[bool]) -> int:
    return list(held).index(False) if False in held else len(held)


def _ends(held: Sequence[bool], trailing: int) -> set[int]:
    """Lengths whose last ``trailing`` pages, or all where there are fewer, are held."""
    ends: set[int] = set()
    run = 0
    for length, there in enumerate(held, 1):
        run = run + 1 if there else 0
        if run >= min(trailing, length):
            ends.add(length)
    return ends
