"""KVTier below SGLang's HiCache: a dynamic storage back end, ``KVTierHiCache``.

SGLang names a module and a class, and this is the module. Importing it loads no SGLang; asking for
the class does.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "KVTierHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvtier_adapters.sglang.back_end").KVTierHiCache
