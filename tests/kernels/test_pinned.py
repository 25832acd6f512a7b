"""Page-locking: counted per process, undone when it fails half way; on a GPU, copies still work."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator

import pytest
import torch

from kvtier_kernels import pinned

MIB = 1 << 20
GIB = 1 << 30
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Runtime:
    """A CUDA runtime in which nothing is locked but numbers."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.fail_at = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        self.calls += 1
        if self.calls == self.fail_at:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 713


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    return made


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """Address space, of which no page is touched."""
    mapping = mmap.mmap(-1, 5 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapping)
    yield view
    view.release()
    mapping.close()


def test_two_users_lock_once_and_the_last_unlocks(runtime: Runtime, memory: memoryview) -> None:
    assert pinned.register(memory)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert runtime.locked == {first: 5 * GIB}
    assert pinned.register(memory)
    assert runtime.calls == 1
    pinned.unregister(memory)
    assert len(runtime.locked) == 1
    pinned.unregister(memory)
    assert runtime.locked == {}


def test_locked_memory_stays_mapped(runtime: Runtime) -> None:
    mapping = mmap.mmap(-1, MIB)
    owners = memoryview(mapping)
    ours = memoryview(owners)
    assert pinned.register(ours)
    owners.release()
    with pytest.raises(BufferError):
        mapping.close()
    pinned.unregister(ours)
    ours.release()
    mapping.close()
    assert runtime.locked == {}


def test_a_refusal_leaves_nothing_locked_and_says_so_once(
    runtime: Runtime, memory: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.fail_at = 1
    with caplog.at_level(logging.WARNING, "kvtier.kernels.pinned"):
        assert not pinned.register(memory)
    assert runtime.locked == {}
    assert caplog.messages == [f"{5 * GIB} bytes stay pageable: cudaHostRegister says 2"]
    assert pinned.register(memory)
    pinned.unregister(memory)


def test_without_cuda_memory_stays_pageable(
    memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not pinned.register(memory)


@cuda
def test_registered_memory_is_pinned_for_torch_and_pageable_again_after() -> None:
    mapping = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapping)
    host = torch.frombuffer(view, dtype=torch.uint8)
    host.random_(0, 255)
    assert pinned.register(view)
    assert host.is_pinned()
    device = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), host)
    pinned.unregister(view)
    assert not host.is_pinned()


@cuda
def test_copies_start_and_end_anywhere_in_many_gib(memory: memoryview) -> None:
    assert pinned.register(memory)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    for start in range(GIB - MIB, len(memory) - MIB, GIB):
        part = host[start : start + 2 * MIB]
        part.random_(0, 255)
        moved = part.to("cuda", non_blocking=True)
        back = torch.zeros_like(part).copy_(moved)
        assert torch.equal(back, part)
    pinned.unregister(memory)


@cuda
def test_a_refused_registration_leaves_torch_without_an_error() -> None:
    """Memory that is locked by somebody else is refused, and the next launch does not raise."""
    mapping = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert int(runtime.cudaHostRegister(address, len(view), 1)) == 0
    assert not pinned.register(view)
    assert torch.ones(4, device="cuda").sum().item() == 4.0
    assert int(runtime.cudaHostUnregister(address)) == 0
    assert pinned.register(view)
    pinned.unregister(view)
