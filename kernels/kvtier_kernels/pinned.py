"""Page-locking memory for CUDA, so that copies to and from a device run at the link's speed.

From pageable memory the driver copies twice, over a buffer of its own, and the call waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import Final

import torch

_log = logging.getLogger("kvtier.kernels.pinned")

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every device of this process.


@dataclass(slots=True)
class _Locked:
    """Memory that is page-locked. ``first_byte`` keeps it mapped, ``users`` counts ``register``."""

    first_byte: ctypes.c_char
    nbytes: int
    users: int = 1


# Page-locking belongs to the process, whoever asks: two workers of one process share an arena.
_locked: dict[int, _Locked] = {}
_lock = threading.Lock()


def register(memory: memoryview) -> bool:
    """Page-lock writable ``memory`` for all devices of this process; blocks for that long.

    True: all of it is locked, and stays mapped, until ``unregister`` was called as often. False:
    none of it is; copies work, only slower, and one line in the log says why (no CUDA, a limit
    on locked memory). Never raises for a fault. Any thread.
    """
    if not torch.cuda.is_available():
        _log.info("%d bytes stay pageable: no CUDA device", len(memory))
        return False
    first_byte = ctypes.c_char.from_buffer(memory)
    with _lock:
        held = _locked.get(ctypes.addressof(first_byte))
        if held is not None:
            held.users += 1
            return True
        locked = _Locked(first_byte, len(memory))
        # In one call: the runtime refuses copies that cross from one call's memory to another's.
        code = _code("cudaHostRegister", ctypes.addressof(first_byte), len(memory), _PORTABLE)
        if code:
            _log.warning("%d bytes stay pageable: cudaHostRegister says %d", len(memory), code)
            return False
        _locked[ctypes.addressof(first_byte)] = locked
    return True


def locked(address: int, nbytes: int) -> bool:
    """Tell whether kernels of this process reach ``nbytes`` bytes from ``address`` on."""
    with _lock:
        return any(
            start <= address and address + nbytes <= start + held.nbytes
            for start, held in _locked.items()
        )


def unregister(memory: memoryview) -> None:
    """Undo one ``register`` that returned True, once this caller's copies are done."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with _lock:
        held = _locked[address]
        held.users -= 1
        if held.users:
            return
        del _locked[address]
        code = _code("cudaHostUnregister", address)
    if code:
        _log.warning("%d bytes stay locked: cudaHostUnregister says %d", held.nbytes, code)


def _code(function: str, *arguments: int) -> int:
    """Call the runtime; return its error code, 0 for success."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(getattr(runtime, function)(*arguments))
    if code:
        # The runtime remembers the error and torch would raise it at its next launch: provoke it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return code
