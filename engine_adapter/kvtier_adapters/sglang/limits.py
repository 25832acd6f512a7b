"""Bounds of the SGLang plug."""

from __future__ import annotations

from typing import Final

#: Pages that a lookup asks for at a time; it stops at the first batch that is not all there.
LOOKUP_PAGES_MAX: Final = 128
#: Batches whose figures wait for SGLang to take them; the oldest are forgotten.
FIGURES_MAX: Final = 1024
