"""What is taken from K before it is rotated: a mean per head, turned to each token's position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from kvtier_kernels.raw import Span


class Taken(NamedTuple):
    """What is taken from some rows: ``mean * cos + partner * sin``, each step rounded.

    float32: ``mean`` and ``partner`` ``[..., 1, dim]``, ``cos`` and ``sin`` ``[tokens, dim]``.
    """

    mean: torch.Tensor
    partner: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def offsets(
        self, out: torch.Tensor | None = None, spare: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The offsets ``[..., tokens, dim]``, in ``out`` if it is given."""
        turned = torch.mul(self.mean, self.cos, out=out)
        return turned.add_(torch.mul(self.partner, self.sin, out=spare))


@dataclass(frozen=True, slots=True)
class Centre:
    """From a row of K, ``mean * cos + partner * sin`` is taken, in this order, each step rounded.

    ``mean`` and ``partner`` are float32 ``[layers, kv_heads, k_dim]`` for a section's heads,
    ``cos`` and ``sin`` float16 ``[tokens, k_dim]`` for a plane's rows: what is taken is given back
    alike, so that narrow tables cost no more than a slightly worse centre. ``partner`` holds for
    each column the mean of the column it turns with, and ``sin`` the sign; columns that do not
    turn have cos 1 and sin 0. All values are finite. The tables are made on a CPU in float64,
    because sine and cosine differ between devices.
    """

    mean: torch.Tensor
    partner: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def check(self, layers: int, span: Span, k_dim: int) -> None:
        """Raise ``ValueError`` unless the tables fit a section."""
        means = (layers, span.kv_heads, k_dim)
        turns = (span.tokens, k_dim)
        wide, narrow = (means, torch.float32), (turns, torch.float16)
        for name, expected in (("mean", wide), ("partner", wide), ("cos", narrow), ("sin", narrow)):
            table: torch.Tensor = getattr(self, name)
            if (tuple(table.shape), table.dtype) != expected:
                raise ValueError(f"{name} is {table.dtype} {tuple(table.shape)}, not {expected}")

    def cut(self, span: Span, device: torch.device) -> Centre:
        """Only what the span's rows need, contiguous on ``device``."""
        heads = slice(span.head_start, span.head_start + span.head_count)
        tokens = slice(span.token_start, span.token_start + span.token_count)
        return replace(
            self,
            mean=self.mean[:, heads].contiguous().to(device),
            partner=self.partner[:, heads].contiguous().to(device),
            cos=self.cos[tokens].contiguous().to(device),
            sin=self.sin[tokens].contiguous().to(device),
        )

    def taken(self, start: int, dim: int) -> Taken:
        """What is taken from columns ``start .. start + dim`` of all planes and tokens."""
        columns = slice(start, start + dim)
        mean, partner = self.mean[..., None, columns], self.partner[..., None, columns]
        return Taken(mean, partner, self.cos[:, columns].float(), self.sin[:, columns].float())

    def offsets(self, start: int, dim: int) -> torch.Tensor:
        """What is taken from columns ``start .. start + dim``: ``[layers, heads, tokens, dim]``."""
        return self.taken(start, dim).offsets()
