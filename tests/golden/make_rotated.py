"""Write the golden bytes of the rotated codecs: a section of each, and what it comes back as.

``python tests/golden/make_rotated.py [FILE]`` writes ``rotated.json`` here unless told otherwise.
Run it only when a new codec is added: bytes that change make shards in the field unreadable.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

from kvtier_kernels import raw
from kvtier_kernels.rotated import Centre, RotatedKernel
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, Format

FILE = Path(__file__).parent / "rotated.json"
TOKENS, BLOCK_TOKENS = 6, 4
SPAN = raw.Span(TOKENS, 0, TOKENS, 1, 0, 1, 0, (1, 0))


def values(name: str, *shape: int) -> torch.Tensor:
    """Multiples of 1/4096 in -8 .. 8 that depend on the name alone, about normally distributed."""
    count = int(np.prod(shape))
    stream = hashlib.shake_256(name.encode()).digest(count * 8)
    halves = np.frombuffer(stream, "<u2").reshape(count, 4).astype(np.int64) - 32768
    return torch.from_numpy(halves.sum(1).astype(np.float32) / 16384).view(shape)


def kernels() -> dict[str, RotatedKernel]:
    """The kernels whose bytes are pinned, by the name of the case."""
    mean, partner = (values(name, 1, 1, 80) for name in ("mean", "partner"))
    cosine, sine = ((values(name, TOKENS, 80) / 8).half() for name in ("cosine", "sine"))
    centre = Centre(mean, partner, cosine, sine)
    return {
        "int8": RotatedKernel(Format(64, 64, INT8, INT8, 2)),
        "int6": RotatedKernel(Format(64, 80, INT6, INT6, 2)),
        "int5k4v": RotatedKernel(Format(128, 64, LM5, LM4, 2)),
        "int5k4v, latent": RotatedKernel(Format(96, 0, LM5, LM4, 2)),
        "int4": RotatedKernel(Format(80, 64, LM4, LM4, 2), sink_tokens=4, centre=centre),
    }


def layers(kernel: RotatedKernel) -> list[raw.LayerViews]:
    """One layer of two blocks in bfloat16."""
    shape = (2, BLOCK_TOKENS, 1)
    k_view = values("K", *shape, kernel.form.k_dim).to(torch.bfloat16)
    dim = kernel.form.v_dim
    return [(k_view, values("V", *shape, dim).to(torch.bfloat16) if dim else None)]


def packed(kernel: RotatedKernel) -> bytes:
    """The section of the case's layer."""
    section = bytearray(kernel.form.section(1, 1, TOKENS, kernel.sink_tokens).nbytes)
    kernel.pack(layers(kernel), SPAN, memoryview(section))
    return bytes(section)


def unpacked(kernel: RotatedKernel, section: bytes) -> bytes:
    """What comes back from a section, into a pool of zeros."""
    target = [
        (torch.zeros_like(k), None if v is None else torch.zeros_like(v)) for k, v in layers(kernel)
    ]
    kernel.unpack(memoryview(section), target, SPAN)
    views = [view for layer in target for view in layer if view is not None]
    return b"".join(view.view(torch.uint8).numpy().tobytes() for view in views)


def golden() -> dict[str, dict[str, str]]:
    """Every case: its section in hex, and the digest of what comes back."""
    found = {}
    for name, kernel in kernels().items():
        section = packed(kernel)
        restored = hashlib.sha256(unpacked(kernel, section)).hexdigest()
        found[name] = {"section": section.hex(), "restored_sha256": restored}
    return found


if __name__ == "__main__":
    target_file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    target_file.write_text(json.dumps(golden(), indent=1) + "\n")
