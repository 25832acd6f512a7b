"""vLLM's KV cache as the pool that codecs read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.types import Part
from kvtier_adapters.vllm.cpu_blocks import CPU_BACKEND, split_block
from kvtier_adapters.vllm.geometry import PLAIN_BACKENDS, Geometry

if TYPE_CHECKING:
    import torch


class VllmPool:
    """One rank's layers by group, each ``[blocks, kv_heads, tokens, K then V]``.

    Satisfies ``kvtier.interfaces.PagedPool``. ``cpu_blocks`` says how transposed ones differ. Of
    opaque blocks the two halves of a row are not K
    and V; as long as whole blocks move, and only bytes, that makes no difference.
    """

    def __init__(self, geometry: Geometry, groups: list[list[torch.Tensor]]) -> None:
        self._geometry = geometry
        self._views = [[self._split(layer) for layer in layers] for layers in groups]
        self._device = groups[0][0].device

    def _split(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self._geometry.head_dim
        if self._geometry.transposed:
            return split_block(layer, dim)
        rows = layer.permute(0, 2, 1, 3)
        return rows[..., :dim], rows[..., dim:]

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._geometry.block_tokens

    @property
    def block_count(self) -> int:
        """Blocks in the pool; ids run from 0."""
        return self._geometry.block_count

    @property
    def on_cuda(self) -> bool:
        """Whether kernels move the blocks."""
        return bool(self._device.type == "cuda")

    @property
    def stream(self) -> int:
        """The CUDA stream of the calling thread, on which vLLM writes blocks.

        0 is CUDA's default stream, or a CPU.
        """
        if not self.on_cuda:
            return 0
        import torch

        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def layer_view(self, group: int, layer: int, part: Part) -> torch.Tensor:
        """Return a view ``[block_count, block_tokens, kv_heads, dim]`` of one layer's K or V."""
        return self._views[group][layer][int(part)]


def open_pool(
    geometry: Geometry, kv_caches: dict[str, Any], backends: dict[str, str]
) -> VllmPool | str:
    """Return the pool of what vLLM registers, or why it is not what the configuration says.

    ``backends`` names the attention of each layer; it matters where blocks are not opaque.
    """
    missing = [name for name in geometry.layer_names if name not in kv_caches]
    if missing:
        return f"layer {missing[0]} has no KV cache of its own"
    shape = (
        geometry.block_count,
        geometry.rank_heads,
        geometry.block_tokens,
        2 * geometry.head_dim,
    )
    for name in geometry.layer_names:
        layer = kv_caches[name]
        found = tuple(layer.shape), str(layer.dtype).removeprefix("torch."), layer.stride(-1)
        if found != (shape, geometry.dtype, 1):
            return f"layer {name} is {found[1]} {found[0]}, not {geometry.dtype} {shape}"
        backend = backends.get(name, "unknown")
        plain = (CPU_BACKEND,) if geometry.transposed else PLAIN_BACKENDS
        if not geometry.opaque and backend not in plain:
            return (
                f"how attention by {backend} keeps K and V is not known; with "
                '"blocks": "opaque" its blocks are stored as they are, for the same vLLM only'
            )
    groups = [[kv_caches[name] for name in group.layer_names] for group in geometry.groups]
    # Layers of different groups may: no block belongs to two groups.
    if any(len({layer.data_ptr() for layer in layers}) < len(layers) for layers in groups):
        return "layers share their KV cache"
    return VllmPool(geometry, groups)
