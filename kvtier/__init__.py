"""KVTier: tiered, verified storage for the KV cache of LLM engines."""

from __future__ import annotations

__version__ = "0.1.0"
