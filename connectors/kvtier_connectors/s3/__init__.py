"""``s3://bucket/prefix``: objects in S3 or a store that speaks like it."""

from __future__ import annotations

from kvtier_connectors.s3.connector import S3Connector

__all__ = ["S3Connector"]
