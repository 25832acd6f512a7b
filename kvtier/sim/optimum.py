"""MIN: what a cache that knows the future would hit (Belady 1966), with bypass.

Of all blocks that will be used again it keeps those that are used soonest, the shallowest first
where that is equal; what is never used again is never kept.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from kvtier.sim.trace import Trace

NEVER = 2**31 - 1


@dataclass(slots=True)
class Future:
    """For each request, where along its path the next use of the blocks changes.

    Next uses never fall along a path, because whoever uses a block uses all above it. Segment j of
    request i, ``starts[i] <= j < starts[i + 1]``, ends before block ``ends[j]`` of the path and is
    used next by request ``uses[j]``.
    """

    starts: array[int] = field(default_factory=lambda: array("q", [0]))
    ends: array[int] = field(default_factory=lambda: array("i"))
    uses: array[int] = field(default_factory=lambda: array("i"))


def future_of(trace: Trace) -> Future:
    """Look at the trace from its end."""
    next_use = [NEVER] * trace.unique_count
    segments: list[list[tuple[int, int]]] = []
    for request in range(trace.request_count - 1, -1, -1):
        path = trace.path(request)
        uses = [next_use[block] for block in path]
        for block in path:
            next_use[block] = request
        found: list[tuple[int, int]] = []
        end = 0
        while end < len(uses):
            use = uses[end]
            end = bisect_right(uses, use, end)
            found.append((end, use))
        segments.append(found)
    future = Future()
    for found in reversed(segments):
        for end, use in found:
            future.ends.append(end)
            future.uses.append(use)
        future.starts.append(len(future.ends))
    return future


@dataclass(slots=True)
class _Segment:
    """Blocks ``start .. end`` of one path, held and used next by the same request."""

    start: int
    end: int


def optimal_hits(trace: Trace, future: Future, capacity: int) -> tuple[array[int], array[int]]:
    """Return for each request the blocks of its prefix that are held, and those newly kept.

    ``capacity`` is in blocks. Segments are kept instead of blocks: all blocks of one are used
    together next, and leave from the deepest.
    """
    hits, kept = array("i"), array("i")
    waiting: dict[int, list[_Segment]] = {}
    latest: list[tuple[int, int, int, _Segment]] = []  # by -next use, -depth, number
    used = number = 0
    for request in range(trace.request_count):
        hit = sum(segment.end - segment.start for segment in waiting.pop(request, ()))
        used -= hit
        hits.append(hit)
        start = 0
        new: list[_Segment] = []
        for at in range(future.starts[request], future.starts[request + 1]):
            use, end = future.uses[at], future.ends[at]
            if use != NEVER:
                segment = _Segment(start, end)
                new.append(segment)
                waiting.setdefault(use, []).append(segment)
                number += 1
                heapq.heappush(latest, (-use, -end, number, segment))
                used += end - start
            start = end
        while used > capacity:
            use, _, _, segment = latest[0]
            count = min(used - capacity, segment.end - segment.start)
            segment.end -= count
            used -= count
            if segment.start == segment.end:
                heapq.heappop(latest)
        depth = sum(segment.end - segment.start for segment in new)
        kept.append(max(0, depth - hit))
    return hits, kept
