"""Compile the codecs' kernels for a GPU that need not be there.

Prints one line of JSON per kernel: its name, how many fused multiply-adds its assembly has, and
the widest loads and stores. A program of its own: in the tests' process kernels are interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier_kernels import fp8, grouped, lossless, raw
from kvtier_kernels.rotated import triton as rotated
from kvtier_kernels.rotated_format import INT8, LM4, LM5, Format
from kvtier_kernels.transfer.stripes import Means, Shape, Stripe

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "jobs": "*i64",
    "blocks": "*i64",
    "failed": "*i32",
    "matrix": "*fp16",
}
#: Arguments that are multiples of 16 for chunks of 256 tokens.
ALIGNED = ("first_head", "first_bytes", "second_head", "second_bytes", "third_head", "part_dim")
TOKENS = 256


def stripes() -> Iterator[tuple[str, str, Stripe]]:
    """Names, dtypes and stripes of all kinds of kernels."""
    cpu = torch.device("cpu")
    means = Means(torch.zeros(1), torch.zeros(1))
    for code, dim, dtype, some in (
        (LM5, 64, "bfloat16", means),
        (LM4, 128, "bfloat16", means),
        (INT8, 80, "float16", None),
    ):
        form = Format(dim, dim, code, code, 2)
        section = form.section(4, 8, TOKENS, 0)
        yield f"rotated-{code.name}", dtype, rotated.stripes(form, section, TOKENS, cpu, some)[0]
    shape = Shape(4, 8, TOKENS, (128, 128), torch.bfloat16, cpu)
    for kernel in (fp8, grouped, lossless, raw):
        name = kernel.__name__.rpartition(".")[2]
        yield name, "bfloat16", kernel.stripes(shape)[0]


def assembly(stripe: Stripe, dtype: str, *, packs: bool) -> str:
    """The PTX of one way of a stripe."""
    kernel = stripe.pack if packs else stripe.unpack
    constants = {
        **stripe.constants,
        "DTYPE": dtype,
        "ELEMENT": tl.int16,
        **dict.fromkeys(("ALIGN", "FIRST", "SECOND", "THIRD"), 16),
    }
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        assert kernel.params[index].is_constexpr == (name in constants), name
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32")
        if name in POINTERS or name in ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options=dict(stripe.options))
    ptx: str = compiled.asm["ptx"]
    return ptx


def main() -> None:
    """Compile each case both ways; ``--stages`` as many tiles in flight as the next word says."""
    stages = int(sys.argv[2]) if "--stages" in sys.argv else 1
    for name, dtype, made in stripes():
        stripe = replace(made, constants={**made.constants, "STAGES": stages})
        for way in ("pack", "unpack"):
            ptx = assembly(stripe, dtype, packs=way == "pack")
            widths = {
                kind: sorted(set(re.findall(rf"{kind}\.global\S*?\.(v\d\.b\d+|b\d+)", ptx)))
                for kind in ("ld", "st")
            }
            fused = len(re.findall(r"\bfma\.", ptx))
            report = {"kernel": name, "way": way, "dtype": dtype, "fused": fused, **widths}
            print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
