"""How fast do packed bytes in page-locked memory of the host become a pool's pages?

The way back of ``pack.py``, measured alike.

    python bench/kernels/unpack.py [--seconds N] [--rounds N] [CODEC ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from bench.kernels.pack import main  # noqa: E402
from kvtier.types import Direction  # noqa: E402

if __name__ == "__main__":
    main("unpack", Direction.LOAD)
