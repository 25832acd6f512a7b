"""An engine's views of its pool, checked once for all the calls that move rows of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch

#: K and V of one layer, each ``[block_count, block_tokens, kv_heads, dim]``; V is None (latent).
LayerViews = tuple[torch.Tensor, torch.Tensor | None]


class PoolLayers(tuple[LayerViews, ...]):  # noqa: SLOT001
    """Layers that fit each other. The views must stay valid and where they are."""

    block_count: int
    block_tokens: int
    kv_heads: int
    parts: int
    element_bytes: int
    #: Bytes of a token's row of one head, K and V together.
    token_bytes: int
    device: torch.device
    #: Bytes of one row, and from a block, a token, a head to the next. None where the views differ,
    #: where a row's values do not touch, and on a GPU.
    row_bytes: int
    steps: tuple[int, int, int] | None
    #: Where each view begins, in the order ``[layer][K, V]``.
    addresses: tuple[int, ...]

    def __new__(cls, layers: Iterable[LayerViews]) -> Self:
        """Check the views. Raises ``ValueError`` unless they fit each other."""
        self = super().__new__(cls, layers)
        if not self:
            raise ValueError("no layers")
        views = [view for layer in self for view in layer if view is not None]
        first = views[0]
        for view in views:
            _check_view(view, first)
        if len({layer[1] is None for layer in self}) > 1:
            raise ValueError("some layers have a V, some have none")
        self.block_count, self.block_tokens, self.kv_heads, dim = first.shape
        self.parts = len(views) // len(self)
        self.element_bytes = first.element_size()
        self.token_bytes = sum(view.shape[3] for view in views[: self.parts]) * self.element_bytes
        self.device = first.device
        self.row_bytes = dim * self.element_bytes
        block, token, head, _ = (step * self.element_bytes for step in first.stride())
        alike = all(v.shape == first.shape and v.stride() == first.stride() for v in views)
        rows = alike and first.stride(3) == 1 and self.device.type == "cpu"
        self.steps = (block, token, head) if rows else None
        self.addresses = tuple(view.data_ptr() for view in views)
        return self


def _check_view(view: torch.Tensor, first: torch.Tensor) -> None:
    if view.dim() != 4 or view.shape[:3] != first.shape[:3]:
        raise ValueError(f"views differ in shape: {tuple(view.shape)}, {tuple(first.shape)}")
    if view.dtype != first.dtype or view.device != first.device:
        raise ValueError("views differ in dtype or device")
    if view.shape[3] < 1:
        raise ValueError("rows without values")
    # Kernels move rows, torch on a CPU whatever it is shown.
    if view.device.type != "cpu" and view.shape[3] > 1 and view.stride(3) != 1:
        raise ValueError(f"the last dimension is not dense: strides {view.stride()}")
