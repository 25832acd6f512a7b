"""Without a GPU, Triton's kernels run in its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Read where a kernel is defined: before a test module imports one.
    os.environ["TRITON_INTERPRET"] = "1"
