"""The raw codec: the pool's own bytes, so that store and load are byte-exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvtier.codecs.sections import section_offset
from kvtier.errors import LayoutError
from kvtier.interfaces import PagedPool
from kvtier.registry import import_problem
from kvtier.types import Move, Part, ShardLayout

if TYPE_CHECKING:
    from kvtier_kernels.raw import LayerViews, Span


class RawCodec:
    """Planes as the pool holds them, in the order ``[layer][kv_head][K, V][tokens][dim]``.

    Stateless. Calls on disjoint rows may run at the same time from several threads. Imports torch
    at the first call of ``pack`` or ``unpack``.
    """

    @property
    def name(self) -> str:
        """``raw``."""
        return "raw"

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Size of one section's planes."""
        plane_bytes = layout.plane_bytes(Part.K) + layout.plane_bytes(Part.V)
        return len(layout.section_layer_range(section)) * layout.kv_heads * plane_bytes

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        """Write the move's rows into ``payload``, which starts at section 0 of the slot.

        Returns when the bytes are in place. Raises ``LayoutError`` where pool, move and payload do
        not fit each other, and ``MissingExtraError`` without torch.
        """
        raw = _kernel()
        span = _span(raw, move)
        for planes, layers in self._sections(pool, move, payload):
            with _mismatch_as_layout_error(move):
                raw.pack(layers, span, planes, pool.stream)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        """Write the move's rows from ``payload`` into the pool's blocks; else as ``pack``."""
        raw = _kernel()
        span = _span(raw, move)
        for planes, layers in self._sections(pool, move, payload):
            with _mismatch_as_layout_error(move):
                raw.unpack(planes, layers, span, pool.stream)

    def _sections(
        self, pool: PagedPool, move: Move, payload: memoryview
    ) -> Iterator[tuple[memoryview, list[LayerViews]]]:
        """The move's sections: each one's bytes of the payload and its layers in the pool."""
        stop = move.first_section + move.section_count
        if not (0 <= move.first_section < stop <= move.layout.sections):
            raise LayoutError(f"the shard has {move.layout.sections} sections: {move}")
        for section in range(move.first_section, stop):
            start = section_offset(self, move.layout, section)
            end = start + self.section_bytes(move.layout, section)
            yield payload[start:end], _layers(pool, move, section)


def _kernel() -> ModuleType:
    try:
        from kvtier_kernels import raw
    except ImportError as error:
        raise import_problem(error, "codec 'raw'") from error
    return raw


def _span(raw: Any, move: Move) -> Span:
    span: Span = raw.Span(
        tokens=move.layout.tokens,
        token_start=move.token_start,
        token_count=move.token_count,
        kv_heads=move.layout.kv_heads,
        head_start=move.heads.shard_start,
        head_count=move.heads.count,
        pool_head_start=move.heads.pool_start,
        block_ids=move.block_ids,
    )
    return span


def _layers(pool: PagedPool, move: Move, section: int) -> list[LayerViews]:
    """The pool's views of a section's layers, checked against the shard's dims and dtype."""
    views: list[LayerViews] = []
    for layer in move.layout.section_layer_range(section):
        pool_layer = move.pool_layer_start + layer
        k_view = _view(pool, move, pool_layer, Part.K)
        v_view = _view(pool, move, pool_layer, Part.V) if move.layout.v_dim else None
        views.append((k_view, v_view))
    return views


def _view(pool: PagedPool, move: Move, layer: int, part: Part) -> Any:
    tensor = _tensor(pool.layer_view(move.shard.group, layer, part))
    dim = move.layout.k_dim if part is Part.K else move.layout.v_dim
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != move.layout.dtype or tensor.shape[-1] != dim:
        raise LayoutError(
            f"layer {layer} {part.name} of the pool is {dtype} of dim {tensor.shape[-1]}, "
            f"the shard's is {move.layout.dtype} of dim {dim}"
        )
    return tensor


def _tensor(view: object) -> Any:
    import torch

    if isinstance(view, torch.Tensor):
        return view
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(view)


@contextmanager
def _mismatch_as_layout_error(move: Move) -> Iterator[None]:
    """The kernel knows no error of ours: it raises ``ValueError`` for what does not fit."""
    try:
        yield
    except ValueError as error:
        raise LayoutError(f"shard {tuple(move.shard)}: {error}") from error
