"""What the codecs that need no more than a kernel share: moves to spans, views and sections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.codecs.sections import section_offset, zero_gaps
from kvtier.errors import CodecError, LayoutError
from kvtier.interfaces import PagedPool
from kvtier.registry import import_problem
from kvtier.types import CodecTraits, Move, Part, ShardLayout

if TYPE_CHECKING:
    import torch

    from kvtier_kernels.raw import LayerViews, Span
    from kvtier_kernels.transfer.stripes import Shape, Stripe


class Kernel(Protocol):
    """A section's packing: the module of a kernel. ``ValueError`` tells what does not fit."""

    def pack(
        self, layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int
    ) -> None:
        """Pack the span's rows into ``target``, one section."""

    def unpack(
        self, source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int
    ) -> None:
        """Unpack the span's rows from ``source``, one section, into the pool."""

    def stripes(self, shape: Shape) -> list[Stripe]:
        """What kernels on a GPU move of a section."""


class PagedCodec(ABC):
    """A block codec over one kernel. A subclass names it, sizes its sections and imports it.

    Stateless. Calls on disjoint rows may run at the same time from several threads. Imports torch
    at the first call of ``pack`` or ``unpack``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that stands in headers and on command lines."""

    @property
    @abstractmethod
    def traits(self) -> CodecTraits:
        """What the tiers must know of it."""

    @abstractmethod
    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Packed size of one section. Raises ``CodecError`` for a dtype that it does not take."""

    @abstractmethod
    def _import_kernel(self) -> Kernel:
        """Import the kernel's module, which imports torch."""

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        """Write the move's rows into ``payload``, which starts at section 0 of the slot.

        What lies between and behind the sections becomes zeros.
        Returns when the bytes are in place. Raises ``LayoutError`` where pool, move and payload do
        not fit each other, ``CodecError`` for values that the codec cannot carry (what was written
        of the payload is then undefined), and ``MissingExtraError`` without torch.
        """
        kernel = self._kernel()
        span = move_span(move)
        for planes, layers in self._sections(pool, move, payload):
            with as_our_error(move):
                kernel.pack(layers, span, planes, pool.stream)
        sections = range(move.first_section, move.first_section + move.section_count)
        zero_gaps(self, move.layout, sections, payload)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        """Write the move's rows from ``payload`` into the pool's blocks; else as ``pack``."""
        kernel = self._kernel()
        span = move_span(move)
        for planes, layers in self._sections(pool, move, payload):
            with as_our_error(move):
                kernel.unpack(planes, layers, span, pool.stream)

    def stripes(self, move: Move, section: int, device: torch.device) -> list[Stripe]:
        """What kernels on ``device`` move of one section of the move."""
        with as_our_error(move):
            return self._kernel().stripes(section_shape(move.layout, section, device))

    def _kernel(self) -> Kernel:
        try:
            return self._import_kernel()
        except ImportError as error:
            raise import_problem(error, f"codec {self.name!r}") from error

    def _sections(
        self, pool: PagedPool, move: Move, payload: memoryview
    ) -> Iterator[tuple[memoryview, Sequence[LayerViews]]]:
        """The move's sections: each one's bytes of the payload and its layers in the pool."""
        stop = move.first_section + move.section_count
        if not (0 <= move.first_section < stop <= move.layout.sections):
            raise LayoutError(f"the shard has {move.layout.sections} sections: {move}")
        for section in range(move.first_section, stop):
            start = section_offset(self, move.layout, section)
            end = start + self.section_bytes(move.layout, section)
            yield payload[start:end], section_layers(pool, move, section)


def section_bytes(layout: ShardLayout, section: int, row_bytes: Callable[[int], int]) -> int:
    """Size of a section, given how many bytes a row of some values takes in all regions."""
    planes = len(layout.section_layer_range(section)) * layout.kv_heads
    dims = [dim for dim in (layout.k_dim, layout.v_dim) if dim]
    return planes * layout.tokens * sum(map(row_bytes, dims))


def section_shape(layout: ShardLayout, section: int, device: torch.device) -> Shape:
    """A section, as kernels are told."""
    import torch

    from kvtier_kernels.transfer.stripes import Shape

    dims = (layout.k_dim, layout.v_dim) if layout.v_dim else (layout.k_dim,)
    layers = len(layout.section_layer_range(section))
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return Shape(layers, layout.kv_heads, layout.tokens, dims, dtype, device)


def move_span(move: Move) -> Span:
    """The rows of a move, as kernels are told."""
    from kvtier_kernels.raw import Span

    return Span(
        tokens=move.layout.tokens,
        token_start=move.token_start,
        token_count=move.token_count,
        kv_heads=move.layout.kv_heads,
        head_start=move.heads.shard_start,
        head_count=move.heads.count,
        pool_head_start=move.heads.pool_start,
        block_ids=move.block_ids,
    )


def section_layers(pool: PagedPool, move: Move, section: int) -> list[LayerViews]:
    """The pool's views of a section's layers, checked against the shard's dims and dtype."""
    views: list[LayerViews] = []
    for layer in move.layout.section_layer_range(section):
        pool_layer = move.pool_layer_start + layer
        k_view = pool_view(pool, move, pool_layer, Part.K)
        v_view = pool_view(pool, move, pool_layer, Part.V) if move.layout.v_dim else None
        views.append((k_view, v_view))
    return views


def pool_view(pool: PagedPool, move: Move, layer: int, part: Part) -> Any:
    """One layer of the pool as a tensor; ``LayoutError`` unless it fits the move's shard."""
    tensor = as_tensor(pool.layer_view(move.shard.group, layer, part))
    dim = move.layout.k_dim if part is Part.K else move.layout.v_dim
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != move.layout.dtype or tensor.shape[-1] != dim:
        raise LayoutError(
            f"layer {layer} {part.name} of the pool is {dtype} of dim {tensor.shape[-1]}, "
            f"the shard's is {move.layout.dtype} of dim {dim}"
        )
    return tensor


def as_tensor(view: object) -> Any:
    """A pool's view as a tensor, of the same memory."""
    import torch

    if isinstance(view, torch.Tensor):
        return view
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(view)


@contextmanager
def as_our_error(move: Move) -> Iterator[None]:
    """The kernels know no error of ours: they raise ``ValueError``, for values a subclass of it."""
    from kvtier_kernels.rows import UnrepresentableError

    try:
        yield
    except UnrepresentableError as error:
        raise CodecError(f"shard {tuple(move.shard)}: {error}") from error
    except ValueError as error:
        raise LayoutError(f"shard {tuple(move.shard)}: {error}") from error
