"""KVTier below vLLM's own CPU tier: a secondary tier, ``KVTierTier``.

vLLM names a module and a class, and this is the module. Importing it loads no vLLM; asking for the
class does, and raises ``ConfigError`` where vLLM has no such tiers as it is written for.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier_adapters.vllm_tier.versions import check_version


def __getattr__(name: str) -> Any:
    if name != "KVTierTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("kvtier_adapters.vllm_tier.tier").KVTierTier
    except ImportError:
        # Other versions miss names; that it is another version says more.
        check_version(str(importlib.import_module("vllm").__version__), forced=False)
        raise
