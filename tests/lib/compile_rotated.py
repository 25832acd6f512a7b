"""Compile the rotated codecs' kernels for a GPU that need not be there.

Prints one line of JSON per kernel: its name, how many fused multiply-adds its assembly has, and
the widest loads and stores. A program of its own: in the tests' process kernels are interpreted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier_kernels.rotated import triton as kernels
from kvtier_kernels.rotated_format import INT8, LM5, Piece

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "table": "*i64",
    "packed": "*u8",
    "failed": "*i32",
    "tables": "*i32",
    **dict.fromkeys(("signs", "mean", "partner", "cosine", "sine"), "*fp32"),
}
#: Arguments that are multiples of 16 for chunks of 256 tokens.
ALIGNED = ("codes_start", "codes_head", "first_bytes", "second_start", "second_bytes", "part_dim")
CASES = [
    (Piece(0, 0, 64, LM5), "bfloat16", True),
    (Piece(0, 0, 80, INT8), "float16", False),
]


def assembly(kernel: Any, piece: Piece, dtype: str, *, centred: bool) -> str:
    """The PTX of one specialization of a kernel."""
    constants = kernels.constants(piece, 256)
    constants |= {"CENTRED": centred, "DTYPE": dtype, "ALIGN": 16}
    constants["ELEMENT"] = tl.int32 if dtype == "float32" else tl.int16
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32")
        if name in POINTERS or name in ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    ptx: str = triton.compile(source, target=HOPPER, options=kernels.OPTIONS).asm["ptx"]
    return ptx


def main() -> None:
    """Compile each case both ways."""
    for piece, dtype, centred in CASES:
        for kernel in (kernels.pack_kernel, kernels.unpack_kernel):
            ptx = assembly(kernel, piece, dtype, centred=centred)
            widths = {
                way: sorted(set(re.findall(rf"{way}\.global\S*?\.(v\d\.b\d+|b\d+)", ptx)))
                for way in ("ld", "st")
            }
            fused = len(re.findall(r"\bfma\.", ptx))
            report = {"kernel": kernel.__name__, "dtype": dtype, "fused": fused, **widths}
            print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
