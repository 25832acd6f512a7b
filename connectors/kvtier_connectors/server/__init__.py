"""``kvtier://``, ``kvtiers://`` and ``kvtier+unix://``: KVTier's own cache server."""

from __future__ import annotations

from kvtier_connectors.server.connector import ServerConnector

__all__ = ["ServerConnector"]
