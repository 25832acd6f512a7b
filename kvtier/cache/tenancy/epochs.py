"""Epochs of namespaces and tenants: raising one makes everything older unreachable at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier.constants import EPOCHS_MAX


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """All epochs above the floor, the floor under all others, and which state this is.

    ``owed`` is what some remote has not been told of; an empty digest stands for the floor.
    """

    epochs: dict[bytes, int]
    floor: int
    version: int
    owed: frozenset[bytes] = frozenset()


class Epochs:
    """Epochs by the digest of a namespace (at epoch 0) or tenant. Never decrease.

    Used under the cache's lock. Each keeper, a directory or after those a remote, keeps all of
    them, so that any one of them can be lost. At most ``EPOCHS_MAX`` stand above the floor: the
    next one raises the floor above them all, which makes everything unreachable that is stored. An
    epoch that were dropped instead could bring back what was declared stale.

    Directories also keep what remotes are owed. So what was raised here while a remote was away is
    above what that knows, even if this process ends before it is told.
    """

    def __init__(self, directories: int = 1, remotes: int = 0) -> None:
        self._epochs: dict[bytes, int] = {}
        self._floor = 0
        self._version = 0
        # Where there is no remote, everything is owed to the first one there will be.
        keepers = directories + max(1, remotes)
        self._directories = directories
        self._kept = [0] * keepers
        # What was raised here since a medium was last read or written; None stands for the floor.
        self._advanced: list[set[bytes | None]] = [set() for _ in range(keepers)]

    @property
    def version(self) -> int:
        """Changes whenever an epoch does."""
        return self._version

    def unsaved(self, keeper: int) -> bool:
        """Tell whether a medium keeps less than is known here."""
        return self._kept[keeper] != self._version

    def owes(self, keeper: int) -> bool:
        """Tell whether a medium has not been told of what was raised here."""
        return bool(self._advanced[keeper])

    def get(self, digest: bytes) -> int:
        """Return a namespace's or tenant's present epoch; 0 until it was first raised."""
        return max(self._epochs.get(digest, 0), self._floor)

    def advance(self, digest: bytes) -> int:
        """Begin the next epoch and return it."""
        self._version += 1
        self._epochs[digest] = self.get(digest) + 1
        for advanced in self._advanced:
            advanced.add(digest)
        self._bound()
        return self.get(digest)

    def merge(self, keeper: int, stored: Mapping[bytes, int], floor: int) -> None:
        """Take in what a medium knew.

        What was advanced here while it could not be read ends up above what it knew.
        """
        before = (dict(self._epochs), self._floor)
        stored = {digest: epoch for digest, epoch in stored.items() if epoch > floor}
        for digest, epoch in stored.items():
            self._epochs[digest] = max(self.get(digest), epoch)
        self._raise_floor(floor)
        for advanced in self._advanced[keeper]:
            if advanced is None:
                self._raise_floor(1 + max((floor, *stored.values())))
            else:
                known = max(stored.get(advanced, 0), floor)
                self._epochs[advanced] = max(self.get(advanced), known + 1)
        self._bound()
        if (self._epochs, self._floor) != before:
            self._version += 1
        known_there = stored == self._epochs and floor == self._floor
        self._kept[keeper] = self._version if known_there else -1

    def owe(self, owed: Collection[bytes]) -> None:
        """Take in what remotes had not been told of when a directory was last written."""
        before = self._owed()
        for advanced in self._advanced[self._directories :]:
            advanced.update(digest or None for digest in owed)
        if self._owed() != before:
            self._version += 1

    def snapshot(self) -> EpochSnapshot:
        """Return everything as it is now."""
        return EpochSnapshot(dict(self._epochs), self._floor, self._version, self._owed())

    def saved(self, keeper: int, snapshot: EpochSnapshot) -> None:
        """Note that a medium keeps a snapshot."""
        self._kept[keeper] = snapshot.version
        owed = self._owed()
        self._advanced[keeper] = {
            advanced
            for advanced in self._advanced[keeper]
            if (
                snapshot.floor != self._floor
                if advanced is None
                else max(snapshot.epochs.get(advanced, 0), snapshot.floor) != self.get(advanced)
            )
        }
        if self._owed() != owed:
            self._version += 1  # For the directories, which keep that too.

    def _owed(self) -> frozenset[bytes]:
        remotes = self._advanced[self._directories :]
        return frozenset(digest or b"" for digest in set[bytes | None]().union(*remotes))

    def _bound(self) -> None:
        """With too much above the floor, raise it above everything."""
        if len(self._epochs) > EPOCHS_MAX:
            self._raise_floor(max(self._epochs.values()) + 1)
            self._advanced = [{None} for _ in self._advanced]

    def _raise_floor(self, floor: int) -> None:
        """Keep nothing beside the floor that it says too."""
        if floor > self._floor:
            self._floor = floor
            self._epochs = {d: epoch for d, epoch in self._epochs.items() if epoch > floor}
