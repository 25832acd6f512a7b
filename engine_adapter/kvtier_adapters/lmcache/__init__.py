"""KVTier below LMCache: an L2 adapter for its server, a remote connector for its older form.

LMCache names a module and a class, and this is the module:

- ``KVTierL2Adapter``, in ``--l2-adapter '{"type": "plugin", …}'`` of the multiprocess server;
- ``KVTierConnector``, in ``remote_storage_plugins`` of LMCache inside an engine.

Importing this loads no LMCache; asking for one of them does.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLUGS = {
    "KVTierL2Adapter": "kvtier_adapters.lmcache.l2_adapter",
    "KVTierL2AdapterConfig": "kvtier_adapters.lmcache.l2_adapter",
    "KVTierConnector": "kvtier_adapters.lmcache.connector",
}


def __getattr__(name: str) -> Any:
    if name not in _PLUGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLUGS[name]), name)
