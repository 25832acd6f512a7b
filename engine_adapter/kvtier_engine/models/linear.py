"""Matrix products with fixed weights: packed once for the CPU, plain elsewhere.

On a CPU, float32 weights are reordered once into oneDNN's blocked form. Compared with the plain
row-major product this is 1.1 to 1.3 times faster for prefill and 2 to 10 times for batches of 2 to
32 tokens, where decode lives.
"""

from __future__ import annotations

import torch
from torch.nn import functional

#: The batch for which oneDNN picks its blocking. The form for 16 is also the fastest or equal for
#: every other batch size that was measured (1 to 512); the one for 1 is slow for all others.
PACK_BATCH = 16

#: The operators behind ``torch.compile``'s CPU back end; torch has no public door to them.
_PACKED = torch.ops.mkldnn


class Linear:
    """``y = x @ weight.T + bias`` for ``x`` of shape ``[tokens, in]``.

    Takes ownership of ``weight [out, in]``; packing copies it, so the caller should let go of it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        if self._packed:
            weight = _PACKED._reorder_linear_weight(weight.contiguous(), PACK_BATCH)  # noqa: SLF001
        self._weight = weight

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product, a new tensor ``[tokens, out]``."""
        if self._packed:
            product: torch.Tensor = _PACKED._linear_pointwise(  # noqa: SLF001
                inputs, self._weight, self._bias, "none", [], ""
            )
            return product
        return functional.linear(inputs, self._weight, self._bias)

    def added_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``residual + product`` in one pass, a new tensor ``[tokens, out]``."""
        if self._packed:
            total: torch.Tensor = _PACKED._linear_pointwise.binary(  # noqa: SLF001
                inputs, residual, self._weight, self._bias, "add"
            )
            return total
        return residual + functional.linear(inputs, self._weight, self._bias)


def _can_pack(weight: torch.Tensor) -> bool:
    is_plain_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
