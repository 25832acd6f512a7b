"""Pages of SGLang's host pools as buffers, where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.errors import LayoutError
from kvtier_adapters.payloads.memory import memory_at

#: A page in memory: K and V, or what else it has, each in one piece.
Page = tuple[memoryview, ...]


def pages_of(host_pool: Any, host_indices: Any, count: int) -> list[Page]:
    """Return the buffers of ``count`` pages, as the pool's ``get_page_buffer_meta`` tells them.

    ``host_indices`` are the pool's slots, a page's one after another. The memory is the pool's and
    lives as long. Raises ``LayoutError`` when the pool tells of no whole number of pieces a page.
    """
    addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
    if len(addresses) != len(sizes) or not count or not addresses or len(addresses) % count:
        raise LayoutError(f"{len(addresses)} pieces in {len(sizes)} sizes for {count} pages")
    views = [memory_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
    each = len(views) // count
    return [tuple(views[start : start + each]) for start in range(0, len(views), each)]


def piece_bytes(pages: Sequence[Page]) -> tuple[int, ...]:
    """Return the sizes of a page's pieces. Raises ``LayoutError`` where pages differ."""
    sizes = {tuple(map(len, page)) for page in pages}
    if len(sizes) != 1:
        raise LayoutError(f"pages of {len(sizes)} forms in one pool")
    (one,) = sizes
    return one


def tensor_bytes(tensor: Any) -> memoryview:
    """Return a tensor's memory. Raises ``LayoutError`` for one not on the host or in pieces."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError("a page that does not lie on the host in one piece")
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
