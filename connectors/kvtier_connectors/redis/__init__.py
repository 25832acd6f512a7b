"""``redis://`` and its relatives: large objects in Redis or Valkey, alone or in a cluster."""

from __future__ import annotations

from kvtier_connectors.redis.connector import RedisConnector

__all__ = ["RedisConnector"]
