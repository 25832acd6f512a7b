"""Without a GPU, Triton's kernels run in its interpreter.

Call ``choose_interpreter`` before any ``kvtier_kernels.*.triton`` is imported: where a kernel is
defined, it is decided how it runs.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def choose_interpreter() -> None:
    """Choose the interpreter if there is no GPU."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "0":
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    name = "_patch_lang_tensor"
    patch = getattr(interpreter, name)

    def patched(tensor: object, scope: Any) -> None:
        # Its scalars are arrays of one element, which numpy 2.4 no longer turns into an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    if patch.__module__ != __name__:
        setattr(interpreter, name, patched)
