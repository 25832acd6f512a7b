"""The epoch of each namespace: raising it makes everything older unreachable at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """All epochs that were ever raised, the floor under all others, and which state this is."""

    epochs: dict[bytes, int]
    floor: int
    version: int


class Epochs:
    """Epochs by namespace digest (at epoch 0). Used under the cache's lock. Never decreases.

    Each of ``keepers`` media keeps all of them, so that any one of them can be lost.
    """

    def __init__(self, keepers: int = 1) -> None:
        self._epochs: dict[bytes, int] = {}
        self._floor = 0
        self._version = 0
        self._kept = [0] * keepers
        # What was raised here since a medium was last read or written.
        self._advanced: list[set[bytes]] = [set() for _ in range(keepers)]

    def unsaved(self, keeper: int) -> bool:
        """Tell whether a medium keeps less than is known here."""
        return self._kept[keeper] != self._version

    def get(self, namespace: bytes) -> int:
        """Return a namespace's present epoch; 0 until it was first invalidated."""
        return max(self._epochs.get(namespace, 0), self._floor)

    def advance(self, namespace: bytes) -> int:
        """Begin the next epoch and return it."""
        self._version += 1
        self._epochs[namespace] = self.get(namespace) + 1
        for advanced in self._advanced:
            advanced.add(namespace)
        return self._epochs[namespace]

    def merge(self, keeper: int, stored: Mapping[bytes, int], floor: int) -> None:
        """Take in what a medium knew.

        What was advanced here while it could not be read ends up above what it knew.
        """
        before = (dict(self._epochs), self._floor)
        for namespace, epoch in stored.items():
            self._epochs[namespace] = max(self.get(namespace), epoch)
        self._floor = max(self._floor, floor)
        for namespace in self._advanced[keeper]:
            known = max(stored.get(namespace, 0), floor)
            self._epochs[namespace] = max(self._epochs[namespace], known + 1)
        if (self._epochs, self._floor) != before:
            self._version += 1
        known_there = dict(stored) == self._epochs and floor == self._floor
        self._kept[keeper] = self._version if known_there else -1

    def snapshot(self) -> EpochSnapshot:
        """Return everything as it is now."""
        return EpochSnapshot(dict(self._epochs), self._floor, self._version)

    def saved(self, keeper: int, snapshot: EpochSnapshot) -> None:
        """Note that a medium keeps a snapshot."""
        self._kept[keeper] = snapshot.version
        self._advanced[keeper] = {
            namespace
            for namespace in self._advanced[keeper]
            if snapshot.epochs.get(namespace) != self._epochs[namespace]
        }
