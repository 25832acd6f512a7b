"""How fast do a pool's pages become packed bytes in page-locked memory of the host?

Every codec straight to the host and over a buffer on the device, with few programs and many, with
kernels alone (HBM to HBM), and with a matrix product beside it. Needs a CUDA device. The gate is
that slots and pages are those of the CPU's reference, bit for bit.

    python bench/kernels/pack.py [--seconds N] [--rounds N] [CODEC ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from bench.lib.journal import Journal  # noqa: E402
from bench.lib.transfer import Lab  # noqa: E402
from bench.lib.transfer_ways import measure  # noqa: E402
from kvtier.types import Direction  # noqa: E402

CODECS = ("int4", "int8", "raw", "int5k4v", "fp8", "int6", "lossless", "int4-g128")


def main(name: str = "pack", direction: Direction = Direction.STORE) -> None:
    """Measure one direction."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("codecs", nargs="*", default=CODECS, metavar="CODEC")
    parser.add_argument("--seconds", type=float, default=210, help="stop after so long (210)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (5)")
    options = parser.parse_args()
    journal = Journal(name, options.seconds)
    measure(Lab(direction), journal, options.codecs, options.rounds)


if __name__ == "__main__":
    main()
