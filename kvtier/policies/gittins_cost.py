"""Gittins, weighted by what a miss costs: deep blocks attend to more, so they cost more to compute.

Hits count by the prefill they save instead of by number.
"""

from __future__ import annotations

from typing import Final

from kvtier.policies.gittins import Gittins
from kvtier.types import Entry

#: Chunks after which attention costs as much as the rest: 30 thousand tokens for a model of 8B
#: parameters, in chunks of 256 tokens. Larger models and chunks differ by a small factor.
ATTENTION_EQUALS_REST_CHUNKS: Final = 120


class GittinsCost(Gittins):
    """A ``Gittins`` for those who want prefill saved, be it in fewer requests."""

    def worth(self, entry: Entry) -> float:
        """Return the chunk's cost per byte, in costs of a first chunk."""
        return (1.0 + entry.position / ATTENTION_EQUALS_REST_CHUNKS) * super().worth(entry)
