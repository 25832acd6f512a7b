"""KVTier below vLLM's own CPU tier: a secondary tier, ``KVTierTier``.

vLLM names a module and a class, and this is the module. Importing it loads no vLLM; asking for the
class does.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "KVTierTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvtier_adapters.vllm_tier.tier").KVTierTier
