"""Faults of a disk that machines of random steps draw from, by name."""

from __future__ import annotations

import errno
from typing import Final

from kvtier.testing.fault_files import (
    EVER,
    BitFlip,
    FileFailure,
    FileFault,
    FileOperation,
    ShortRead,
    TornWrite,
)

READ, CREATE = (FileOperation.READ,), (FileOperation.CREATE,)

DISK_FAULTS: Final[dict[str, FileFault]] = {
    "none": FileFailure(operations=()),
    "read": FileFailure(operations=READ, nth=2),
    "reads": FileFailure(operations=READ, last=EVER),
    "flip": BitFlip(nth=1),
    "short": ShortRead(nth=2, nbytes=4096),
    "full": FileFailure(operations=CREATE, errno=errno.ENOSPC, last=EVER),
    "torn": TornWrite(nth=2, nbytes=4096),
}
