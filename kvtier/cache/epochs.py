"""The epoch of each namespace: raising it makes everything older unreachable at once."""

from __future__ import annotations

from collections.abc import Mapping


class Epochs:
    """Epochs by namespace digest (at epoch 0). Used under the cache's lock. Never decreases."""

    def __init__(self) -> None:
        self._epochs: dict[bytes, int] = {}
        self._floor = 0

    def get(self, namespace: bytes) -> int:
        """Return a namespace's present epoch; 0 until it was first invalidated."""
        return max(self._epochs.get(namespace, 0), self._floor)

    def advance(self, namespace: bytes) -> int:
        """Begin the next epoch and return it."""
        self._epochs[namespace] = self.get(namespace) + 1
        return self._epochs[namespace]

    def merge(self, stored: Mapping[bytes, int], floor: int) -> bool:
        """Take in what a medium knew; tell whether it knew less than is known here."""
        for namespace, epoch in stored.items():
            self._epochs[namespace] = max(self.get(namespace), epoch)
        self._floor = max(self._floor, floor)
        return dict(stored) != self._epochs or floor != self._floor

    def snapshot(self) -> tuple[dict[bytes, int], int]:
        """Return all epochs that were ever raised, and the floor under all others."""
        return dict(self._epochs), self._floor
