"""Bounds of the LMCache plugs."""

from __future__ import annotations

from typing import Final

from kvtier.constants import MIB

#: Results that nobody has asked for yet; the oldest are forgotten.
RESULTS_MAX: Final = 65_536
#: Objects whose sizes are known, for LMCache's quotas; the oldest are no longer counted there.
KEYS_MAX: Final = 1_048_576
#: Objects that lookups have locked against being deleted; a lookup beyond finds nothing.
LOCKS_MAX: Final = 1_048_576
#: Stores that one adapter works at in one moment: few, so that loads are not held up.
STORES_ACTIVE_MAX: Final = 4
#: Layouts that one adapter tells of.
LAYOUTS_MAX: Final = 16

#: Bytes that an import reads before it waits for them to be kept.
IMPORT_BATCH_BYTES: Final = 64 * MIB
#: Files that one import takes on.
IMPORT_FILES_MAX: Final = 1_000_000
#: How long an import waits for the disk to be opened, and for what it read to be written.
IMPORT_WAIT_S: Final = 120.0
