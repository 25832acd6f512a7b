"""One row through a kernel and back: a pool of one block of one token, K alone."""

from __future__ import annotations

from types import ModuleType

import torch

from kvtier_kernels import raw

SPAN = raw.Span(1, 0, 1, 1, 0, 1, 0, (0,))


def pack_row(kernel: ModuleType, row: torch.Tensor) -> bytes:
    """The section of one row."""
    section = bytearray(sum(kernel.row_bytes(len(row))))
    kernel.pack([(row.view(1, 1, 1, -1), None)], SPAN, memoryview(section))
    return bytes(section)


def unpack_row(kernel: ModuleType, section: bytes, like: torch.Tensor) -> torch.Tensor:
    """The row of a section, of the dtype and dim of ``like``."""
    row = torch.full_like(like, float("nan"))
    kernel.unpack(memoryview(section), [(row.view(1, 1, 1, -1), None)], SPAN)
    return row


def round_trip(kernel: ModuleType, row: torch.Tensor) -> torch.Tensor:
    """What comes back for a row."""
    return unpack_row(kernel, pack_row(kernel, row), row)
