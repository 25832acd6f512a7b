"""The same calibrations in every directory of a disk tier: losing one loses none of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibration_store import FOLDER, CalibrationStore
from kvtier.errors import KVTierError, TierUnavailableError
from kvtier.types import KVLayout, Namespace

_log = logging.getLogger("kvtier.calibration")


class CalibrationCopies:
    """Calibrations below several directories. Safe from any thread; every call blocks.

    Whatever any directory has is there; where they differ, the first one counts.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """``directories`` are those of the disk tier, at least one; they need not be there yet."""
        assert directories, "calibrations lie below directories"
        self._stores = [CalibrationStore(path / FOLDER) for path in directories]

    def load(self, namespace: Namespace, codec: str) -> Calibration | None:
        """As ``CalibrationStore.load``."""
        found = (store.load(namespace, codec) for store in self._stores)
        return next((each for each in found if each is not None), None)

    def find(self, calibration_id: str, layout: KVLayout) -> Calibration | None:
        """As ``CalibrationStore.find``."""
        found = (store.find(calibration_id, layout) for store in self._stores)
        return next((each for each in found if each is not None), None)

    def every(self, layout: KVLayout) -> list[Calibration]:
        """Return all calibrations of a layout, each once."""
        found = {each.digest: each for store in self._stores for each in store.every(layout)}
        return list(found.values())

    def offer(self, namespace: Namespace, codec: str, calibration: Calibration) -> Calibration:
        """Make a calibration the one of its model and codec; return the one that is, or was.

        In every directory that can be written when this returns. Raises ``TierFullError`` or
        ``TierUnavailableError`` where none can be.
        """
        chosen = self.load(namespace, codec) or calibration
        problem: KVTierError | None = None
        kept = 0
        for store in self._stores:
            try:
                found = store.offer(namespace, codec, chosen)
            except KVTierError as error:
                problem = problem or error
                _log.warning("a directory takes no calibration: %s", error)
                continue
            chosen = chosen if kept else found
            kept += 1
        if not kept:
            raise problem or TierUnavailableError("no directory for a calibration")
        return chosen
