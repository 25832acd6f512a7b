"""Bounds of what plugs with foreign keys take on, each with what it bounds in its name."""

from __future__ import annotations

from typing import Final

from kvtier.constants import GIB

DRAM_BYTES_DEFAULT: Final = GIB
#: How long a lookup waits for a tier that is being opened or asked.
LOOKUP_DEADLINE_S_DEFAULT: Final = 1.0
#: Deadlines may not be longer: an engine's thread stands behind some of them.
DEADLINE_S_MAX: Final = 60.0
#: Threads that copy at the same time, for each kind of payload.
COPY_THREADS_DEFAULT: Final = 2
COPY_THREADS_MAX: Final = 16

#: Jobs that one thread has taken on and not ended, and how many of them are begun at a time.
JOBS_MAX: Final = 4096
JOBS_ACTIVE_MAX: Final = 32

#: Pauses between two looks at work that is under way and of which there is no news.
PAUSE_S_MIN: Final = 200e-6
PAUSE_S_MAX: Final = 1e-3

#: What goes wrong is logged once in this time; what came meanwhile is counted.
COMPLAINT_INTERVAL_S: Final = 60.0
