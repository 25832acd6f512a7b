"""Which blocks hold KV that came back from a lossy codec: it is never packed a second time."""

from __future__ import annotations

from collections.abc import Sequence


class LossyBlocks:
    """Remembers blocks by what they hold, so that one that is used anew is forgotten.

    One thread only: the engine's. At most one mark per block of the pool.
    """

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}

    def mark(self, digests: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Note that blocks hold what their digests say, as a lossy codec brought it back."""
        self._digests.update(zip(block_ids, digests, strict=False))

    def count(self, digests: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Return how many leading blocks of a sequence reach up to its last lossy one."""
        if not self._digests:
            return 0
        for index in range(min(len(digests), len(block_ids)) - 1, -1, -1):
            if self._digests.get(block_ids[index]) == digests[index]:
                return index + 1
        return 0
