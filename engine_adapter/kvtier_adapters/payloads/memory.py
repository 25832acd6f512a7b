"""Memory of an engine that is known by its address alone, as a buffer."""

from __future__ import annotations

import ctypes
from typing import Final

_WRITABLE: Final = 0x200  # PyBUF_WRITE
_from_memory: Final = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return writable host memory as a view, without a copy.

    The caller guarantees that the memory is there, and stays for as long as the view is used.
    """
    assert address > 0, "no memory lies at address 0"
    assert nbytes >= 0, "memory of less than no bytes"
    view = _from_memory(address, nbytes, _WRITABLE)
    assert isinstance(view, memoryview), "the interpreter made something else"
    return view
