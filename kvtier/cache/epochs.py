"""The epoch of each namespace: raising it makes everything older unreachable at once."""

from __future__ import annotations

from collections.abc import Mapping


class Epochs:
    """Epochs by namespace digest (at epoch 0). Used under the cache's lock. Never decreases."""

    def __init__(self) -> None:
        self._epochs: dict[bytes, int] = {}
        self._floor = 0
        self._unsaved: set[bytes] = set()

    @property
    def unsaved(self) -> bool:
        """True from an ``advance`` until a medium keeps it."""
        return bool(self._unsaved)

    def get(self, namespace: bytes) -> int:
        """Return a namespace's present epoch; 0 until it was first invalidated."""
        return max(self._epochs.get(namespace, 0), self._floor)

    def advance(self, namespace: bytes) -> int:
        """Begin the next epoch and return it."""
        self._epochs[namespace] = self.get(namespace) + 1
        self._unsaved.add(namespace)
        return self._epochs[namespace]

    def merge(self, stored: Mapping[bytes, int], floor: int) -> bool:
        """Take in what a medium knew; tell whether it knew less than is known here.

        What was advanced here while the medium could not be read ends up above what it knew.
        """
        for namespace, epoch in stored.items():
            self._epochs[namespace] = max(self.get(namespace), epoch)
        self._floor = max(self._floor, floor)
        for namespace in self._unsaved:
            known = max(stored.get(namespace, 0), floor)
            self._epochs[namespace] = max(self._epochs[namespace], known + 1)
        return dict(stored) != self._epochs or floor != self._floor

    def snapshot(self) -> tuple[dict[bytes, int], int]:
        """Return all epochs that were ever raised, and the floor under all others."""
        return dict(self._epochs), self._floor

    def saved(self, epochs: Mapping[bytes, int]) -> None:
        """Note that a medium keeps these epochs of a snapshot."""
        self._unsaved = {n for n in self._unsaved if epochs.get(n) != self._epochs[n]}
