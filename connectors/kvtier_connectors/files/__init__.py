"""``file:///folder``: objects as files of a folder that many hosts may share."""

from __future__ import annotations

from kvtier_connectors.files.connector import FileConnector

__all__ = ["FileConnector"]
