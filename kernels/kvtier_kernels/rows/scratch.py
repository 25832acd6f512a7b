"""Memory that a thread uses over and over: new memory costs a page fault for every 4 KiB of it."""

from __future__ import annotations

import threading
from typing import Final

import torch

_KEPT_BYTES_MAX: Final = 2**24
_LINE_BYTES: Final = 64


class _Kept(threading.local):
    """Each thread's memory."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


_kept = _Kept()


def scratch(*sizes: int) -> list[torch.Tensor]:
    """Flat uint8 memory of so many bytes each, aligned to lines, for the calling thread.

    Its bytes are undefined, and the thread's next call has the same memory. A thread keeps at most
    16 MiB; what is larger is made anew each time.
    """
    steps = [-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes]
    data = _kept.data
    if data.numel() < sum(steps):
        data = torch.empty(sum(steps), dtype=torch.uint8)
        if data.numel() <= _KEPT_BYTES_MAX:
            _kept.data = data
    parts = torch.split(data[: sum(steps)], steps)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]
