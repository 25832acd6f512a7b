"""vLLM's KV cache as the pool that codecs read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.types import Part
from kvtier_adapters.vllm.cpu_blocks import CPU_BACKEND, split_block
from kvtier_adapters.vllm.geometry import PLAIN_BACKENDS, Geometry

if TYPE_CHECKING:
    import torch


class VllmPool:
    """One rank's layers, each ``[blocks, kv_heads, tokens, K then V]``.

    Satisfies ``kvtier.interfaces.PagedPool``. ``cpu_blocks`` says how transposed ones differ. Of
    opaque blocks the two halves of a row are not K
    and V; as long as whole blocks move, and only bytes, that makes no difference.
    """

    def __init__(self, geometry: Geometry, layers: list[torch.Tensor]) -> None:
        self._geometry = geometry
        dim = geometry.head_dim
        if geometry.transposed:
            self._views = [split_block(layer, dim) for layer in layers]
        else:
            rows = [layer.permute(0, 2, 1, 3) for layer in layers]
            self._views = [(each[..., :dim], each[..., dim:]) for each in rows]
        self._device = layers[0].device

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
        assert group == 0, f"KV group {group} of 1"
        return self._views[layer][int(part)]


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
    layers = [kv_caches[name] for name in geometry.layer_names]
    for name, layer in zip(geometry.layer_names, layers, strict=True):
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
    if len({layer.data_ptr() for layer in layers}) < len(layers):
        return "layers share their KV cache"
    return VllmPool(geometry, layers)
