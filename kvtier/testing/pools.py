"""A paged pool over torch tensors, in any of the physical layouts that engines use."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kvtier.types import DTYPE_BYTES, KVGroup, Part

if TYPE_CHECKING:
    import torch

POISON: Final = 0xEE


class Arrangement(StrEnum):
    """How one layer lies in memory, outermost dimension first.

    ``head_major``: part, head, block, token, dim (a head's tokens of neighbouring blocks touch).
    ``token_major``: part, block, token, head, dim. ``block_major``: part, block, head, token, dim.
    ``packed``: block, head, token, then K's and V's dims in one row, so that no row touches the
    next one of its part. ``stacked``: as ``head_major``, but all layers of a group lie in one
    allocation, evenly spaced, as in the bundled engine; elsewhere each has its own.
    """

    HEAD_MAJOR = "head_major"
    TOKEN_MAJOR = "token_major"  # noqa: S105
    BLOCK_MAJOR = "block_major"
    PACKED = "packed"
    STACKED = "stacked"


_ORDERS: Final = {
    Arrangement.HEAD_MAJOR: "hbt",
    Arrangement.TOKEN_MAJOR: "bth",
    Arrangement.BLOCK_MAJOR: "bht",
    Arrangement.PACKED: "bht",
    Arrangement.STACKED: "hbt",
}


class TorchPool:
    """A ``PagedPool`` for tests. ``groups`` are the pool's own: ``kv_heads`` counts its heads.

    Starts out poisoned: every byte is ``POISON``.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        block_count: int,
        block_tokens: int = 16,
        arrangement: Arrangement = Arrangement.HEAD_MAJOR,
        device: str = "cpu",
    ) -> None:
        """Allocate the pool's memory on ``device``."""
        self._block_count = block_count
        self._block_tokens = block_tokens
        self._arrangement = arrangement
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._views: dict[tuple[int, int, Part], torch.Tensor] = {}
        for group_index, group in enumerate(groups):
            if arrangement is Arrangement.STACKED:
                self._add_stack(group_index, group)
                continue
            for layer in range(len(group.layers)):
                self._add_layer(group_index, layer, group)
        self.poison()

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._block_tokens

    @property
    def block_count(self) -> int:
        """Blocks per KV group."""
        return self._block_count

    @property
    def stream(self) -> int:
        """The device's current CUDA stream; 0 on a CPU."""
        import torch

        if torch.device(self._device).type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream

    def layer_view(self, group: int, layer: int, part: Part) -> torch.Tensor:
        """View ``[block_count, block_tokens, kv_heads, dim]``; a ``KeyError`` where none is."""
        return self._views[group, layer, part]

    def poison(self) -> None:
        """Set every byte to ``POISON``."""
        for memory in self._memory:
            memory.fill_(POISON)

    def fill_bytes(self, seed: int) -> None:
        """Fill with random bytes: any bit pattern, so no two rows are alike and NaNs occur."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for memory in self._memory:
            random = torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator)
            memory.copy_(random)

    def fill_values(self, seed: int) -> None:
        """Fill with normally distributed values, rounded to the pool's dtype."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for view in self._views.values():
            view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))

    def rows(self, group: int, layer: int, part: Part, blocks: Sequence[int]) -> torch.Tensor:
        """Copy of the blocks' tokens, ``[len(blocks) * block_tokens, kv_heads, dim]``, on the CPU.

        Goes block by block: an oracle that shares nothing with the code under test.
        """
        import torch

        view = self.layer_view(group, layer, part)
        return torch.cat([view[block].cpu() for block in blocks])

    def snapshot(self) -> bytes:
        """All of the pool's bytes, to compare what was not to be touched."""
        return b"".join(memory.cpu().numpy().tobytes() for memory in self._memory)

    def _add_layer(self, group_index: int, layer: int, group: KVGroup) -> None:
        dims = {Part.K: group.k_dim, Part.V: group.v_dim}
        if self._arrangement is Arrangement.PACKED:
            row = self._allocate(group, group.k_dim + group.v_dim)
            self._views[group_index, layer, Part.K] = row[..., : group.k_dim]
            self._views[group_index, layer, Part.V] = row[..., group.k_dim :]
            return
        for part, dim in dims.items():
            if dim:
                self._views[group_index, layer, part] = self._allocate(group, dim)

    def _add_stack(self, group_index: int, group: KVGroup) -> None:
        import torch

        dims = {Part.K: group.k_dim, Part.V: group.v_dim}
        layer_bytes = self._plane_bytes(group, group.k_dim + group.v_dim)
        nbytes = layer_bytes * len(group.layers)
        stack = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._memory.append(stack)
        start = 0
        for layer in range(len(group.layers)):
            for part, dim in dims.items():
                if dim:
                    end = start + self._plane_bytes(group, dim)
                    self._views[group_index, layer, part] = self._shape(
                        stack[start:end], group, dim
                    )
                    start = end

    def _allocate(self, group: KVGroup, dim: int) -> torch.Tensor:
        """One tensor ``[block, token, head, dim]`` over memory of its own."""
        import torch

        nbytes = self._plane_bytes(group, dim)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._memory.append(memory)
        return self._shape(memory, group, dim)

    def _plane_bytes(self, group: KVGroup, dim: int) -> int:
        rows = self._block_count * self._block_tokens * group.kv_heads
        return rows * dim * DTYPE_BYTES[group.dtype]

    def _shape(self, memory: torch.Tensor, group: KVGroup, dim: int) -> torch.Tensor:
        """View bytes, which lie in the pool's arrangement, as ``[block, token, head, dim]``."""
        import torch

        sizes = {"b": self._block_count, "t": self._block_tokens, "h": group.kv_heads}
        order = _ORDERS[self._arrangement]
        dtype: torch.dtype = getattr(torch, group.dtype)
        shaped = memory.view(dtype).view(*(sizes[axis] for axis in order), dim)
        return shaped.permute(*(order.index(axis) for axis in "bth"), 3)
