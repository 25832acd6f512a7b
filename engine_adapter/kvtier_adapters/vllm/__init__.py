"""The plug for vLLM: a KV connector that vLLM loads by this module's path.

Importing the module loads neither vLLM nor torch; asking it for ``KVTierConnector`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_adapters.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]


def __getattr__(name: str) -> object:
    if name != "KVTierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier_adapters.vllm.connector import KVTierConnector

    return KVTierConnector
