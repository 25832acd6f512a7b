"""Bounds of the secondary tier."""

from __future__ import annotations

from typing import Final

#: A chunk that failed to load is not said to be held for this long, unless it is stored again.
DOUBT_S: Final = 30.0
#: Chunks that are doubted, or waited for, at a time; the oldest are forgotten.
DOUBTS_MAX: Final = 65_536
#: Cascades that are worked at in one moment: few, so that loads are not held up.
STORES_ACTIVE_MAX: Final = 4
#: How much longer than the deadlines of its jobs a drain waits.
DRAIN_EXTRA_S: Final = 5.0
