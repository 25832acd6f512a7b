"""What is out at one directory, and what is done there between writes."""

from __future__ import annotations

from kvtier.tiers.disk.volume import Chores, Volume


class Lane:
    """One directory as its writing thread knows it. ``do`` runs there, all else under the lock."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.chores_out = False
        # Why room was not made; set by the writing thread, cleared when nothing is out there.
        self._no_room_made: OSError | None = None

    @property
    def idle(self) -> bool:
        """True when nothing is out that a later write would follow."""
        return self.volume.writing_count == 0 and not self.chores_out

    def forgive(self) -> None:
        """What starts from now on takes the chores that failed with it."""
        if self.idle:
            self._no_room_made = None

    def do(self, chores: Chores) -> None:
        """Make room; in the writing thread. Raises ``OSError``.

        Once it could not be made, all that is out fails: it was given room that is not there.
        """
        if self._no_room_made is not None:
            cause = self._no_room_made
            reason = f"{cause.strerror or cause}, when room was to be made"
            raise OSError(cause.errno, reason) from cause
        try:
            self.volume.do(chores)
        except OSError as error:
            self._no_room_made = error
            raise
